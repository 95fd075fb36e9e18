"""N-gram drafts: tokens that followed the last ones earlier in the text."""
