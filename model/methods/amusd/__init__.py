"""AMUSD: the draft model never stops drafting, and the target verifies what has arrived."""
