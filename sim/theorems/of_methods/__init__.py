"""Theorems on the methods: one or more files per method."""
