"""The decoding methods as generators of steps, one page each. The file of a method holds its parameters and its process."""
