"""What is true without a clock: theorems, algorithms as generators of steps, laws of outcomes, costs, published data."""
