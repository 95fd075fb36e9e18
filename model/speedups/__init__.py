"""Speed-ups: their terms, and the differences between two of them."""
