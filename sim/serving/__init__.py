"""Serving under load: loads, the server on a clock, and what users see of it."""
