"""Comparison of predictions with measured runs."""
