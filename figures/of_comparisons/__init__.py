"""Figures of predictions next to measurements."""
