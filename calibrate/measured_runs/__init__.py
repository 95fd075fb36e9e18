"""Timed decodings in random order, together with the profiles measured in the same session."""
