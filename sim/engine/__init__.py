"""The discrete-event simulator: an algorithm interpreted on compute units and links."""
