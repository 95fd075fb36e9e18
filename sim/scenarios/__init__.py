"""Scenarios: their files, sections, cases and grid; bundled scenarios are in `bundled`."""
