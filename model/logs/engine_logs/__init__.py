"""Logs and benchmark outputs of serving engines: a module per engine with its dialects, and the sums over lines and files."""
