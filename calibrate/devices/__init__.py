"""Devices: their facts, ceilings, clocks and failures."""
