"""Self-speculative decoding: the first layers draft, the others verify."""
