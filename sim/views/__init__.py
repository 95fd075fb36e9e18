"""The three views of a grid point (formula, paths, events), and the check that they agree."""
