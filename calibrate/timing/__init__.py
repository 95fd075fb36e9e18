"""Times of layers, passes, reads and transfers, and profiles made of them."""
