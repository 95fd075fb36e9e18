"""Mutation tests: planted faults, and the share of them that the tests catch."""
