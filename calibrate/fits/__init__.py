"""Fits of cost parameters to measured times, with their errors on held-out measurements."""
