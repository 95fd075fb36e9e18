"""Shapes of transformers: parameters, arithmetic, weights and cache of a pass."""
