"""Decoding with real models: texts, position logs, acceptance rates and quality."""
