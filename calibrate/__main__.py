"""`python -m calibrate` is the `calibrate` command."""

from calibrate.commands.calibrate_app import main

main()
