"""Embedded scenarios."""
