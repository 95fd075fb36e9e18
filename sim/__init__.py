"""Simulated decoding: scenarios, sweeps, and the views that must agree."""
