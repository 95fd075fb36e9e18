"""Fits of what theorems leave out to measured times, and how well each predicts what it was not fitted on."""
