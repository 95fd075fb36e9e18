"""Speculative decoding with three models."""
