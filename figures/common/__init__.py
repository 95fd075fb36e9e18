"""Parts shared by all figures: style, labels, names of points, provenance of numbers."""
