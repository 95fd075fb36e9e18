"""Reports to hand on: a document without clock or run, made by builders for each kind of result, rendered as HTML or Markdown."""
