"""What measured rows say: fits that anyone can compute again from the rows in `calibrate/measurements`."""
