"""[outcomes] of a scenario: checked tables, from which the laws of a point are built, by kind of outcome."""
