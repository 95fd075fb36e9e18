"""SkipDecode."""
