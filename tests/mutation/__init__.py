"""Faults planted by a seed, and which of them the tests catch."""
