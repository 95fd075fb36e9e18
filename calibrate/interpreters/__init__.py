"""Algorithms interpreted by real models in one process."""
