"""Figures of published tables."""
