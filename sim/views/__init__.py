"""The three views of a point, and whether they agree."""
