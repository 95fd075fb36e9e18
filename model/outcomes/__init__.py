"""Probability laws of outcomes (matches, acceptances, ...), their random streams, and confidence intervals."""
