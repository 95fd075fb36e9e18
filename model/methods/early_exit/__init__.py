"""Early exit, by confidence (CALM) or at a fixed layer."""
