"""Devices, hardware profiles, and cost models of passes in seconds."""
