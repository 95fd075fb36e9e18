"""Timed decodings, in a random order, with the profiles that belong to them."""
