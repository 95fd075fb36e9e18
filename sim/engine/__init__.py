"""Discrete-event simulator of decoding algorithms on compute units and links."""
