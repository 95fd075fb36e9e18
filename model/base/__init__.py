"""Foundations of all packages: checks and their errors, records from tables, reading and writing of files."""
