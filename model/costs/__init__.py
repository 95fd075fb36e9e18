"""Costs of steps, in layer-times or in seconds."""
