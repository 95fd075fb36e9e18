"""Tree drafts."""
