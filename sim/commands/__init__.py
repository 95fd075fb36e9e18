"""The `sim` command."""
