"""Advice: would a decoding method pay on this model, device and engine, from which batch on not, and how sure is that."""
