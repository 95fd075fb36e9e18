"""Distributed speculative inference: several replicas of the target verify while the draft model drafts."""
