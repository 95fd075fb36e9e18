"""Interpreters without a clock: the counter, the account of work, and the hidden world that answers reads."""
