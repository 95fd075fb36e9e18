"""PEARL: drafting and verifying concurrently."""
