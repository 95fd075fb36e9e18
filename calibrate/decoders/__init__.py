"""Real models, layer by layer, with their cache."""
