"""Devices and profiles, and what passes take on them in seconds."""
