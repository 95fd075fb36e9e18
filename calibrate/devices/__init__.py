"""The machine and its clocks."""
