"""Decoding with real models: outputs, position logs, acceptance rates and quality."""
