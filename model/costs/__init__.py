"""What a pass takes, in layer-times or in seconds."""
