"""The version of what a run stores."""

RESULTS_VERSION = 6
"""Raised when the same scenario would give other numbers, or other columns: shards of another version are not resumed."""
