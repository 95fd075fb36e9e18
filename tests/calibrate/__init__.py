"""Tests of `calibrate`."""
