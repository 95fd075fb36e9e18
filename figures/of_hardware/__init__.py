"""Figures of profiles."""
