"""Figures of closed forms."""
