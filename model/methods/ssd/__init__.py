"""SSD: drafts for the likely outcomes of a verification, prepared while the target verifies."""
