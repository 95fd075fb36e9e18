"""Figures of servers under load."""
