"""Scenarios: their files, sections, cases and grid; the bundled ones lie in `bundled`."""
