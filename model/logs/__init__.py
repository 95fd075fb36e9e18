"""Records exchanged between programs: position logs, read logs, measured runs and their time spans."""
