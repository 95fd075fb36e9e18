"""What advice is computed from: acceptance as draws, speed-ups of draft lengths with intervals, memory."""
