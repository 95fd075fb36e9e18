"""What a serving engine adds to its kernels: step laws, their fit to measured cells, and which cell to measure next."""
