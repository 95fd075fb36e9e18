"""Runs of a scenario: shards, results, verdict, report and files."""
