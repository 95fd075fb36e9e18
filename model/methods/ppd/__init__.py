"""Predictive Pipelined Decoding."""
