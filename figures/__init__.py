"""Draws stored rows."""
