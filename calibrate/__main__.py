"""`python -m calibrate` is the `calibrate` command."""

from calibrate.cli import main

main()
