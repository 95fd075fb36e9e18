"""What all figures share: style, labels, names, and where numbers come from."""
