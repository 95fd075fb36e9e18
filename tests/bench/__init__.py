"""How fast we are, each time against the least that the same work can take: `python -m tests.bench`, or `make bench`."""
