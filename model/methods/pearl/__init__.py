"""PEARL: drafting and verifying at the same time."""
