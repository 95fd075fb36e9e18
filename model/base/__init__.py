"""What every package is built on: checks with their errors, records from tables, files that are read and written."""
