"""Plain decoding."""
