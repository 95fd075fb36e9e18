"""Interpreters without a clock: the counter, the account of work, and simulated answers to reads."""
