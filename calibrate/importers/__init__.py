"""Importers of other projects' hardware measurements as profiles, one module per format."""
