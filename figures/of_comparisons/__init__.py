"""Figures of predictions beside measurements."""
