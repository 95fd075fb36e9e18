"""Claims of speed-ups, checked against what is possible: terms of a claim, times at a device's peaks, verdicts."""
