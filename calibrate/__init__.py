"""Real models on real hardware: decode, time, log decisions, fit."""
