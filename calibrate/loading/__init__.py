"""Models, tokenizers and prompts from files."""
