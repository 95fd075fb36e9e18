"""Other projects' measurements of hardware, as profiles: one module for each format."""
