"""Figures of logs of real models."""
