"""Theory and data without a clock: theorems, decoding algorithms as generators of steps, outcome laws, costs, published data."""
