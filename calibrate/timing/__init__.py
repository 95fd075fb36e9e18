"""Times of layers, passes, reads and transfers, and the profiles built from them."""
