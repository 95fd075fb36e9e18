"""The decoding methods, a folder each: algorithm, theory, paths, and what only that method needs."""
