"""The tests: where formula, simulation and run meet."""
