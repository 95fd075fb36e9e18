"""Speculative decoding with draft lengths that are chosen while decoding."""
