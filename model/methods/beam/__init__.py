"""Speculative decoding for beam search."""
