"""Benchmarks: speed of the project relative to a limit for the same work; run `python -m tests.bench` or `make bench`."""
