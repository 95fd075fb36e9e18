"""Algorithms interpreted by real models over several processes."""
