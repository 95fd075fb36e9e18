"""`python -m sim` is the `sim` command."""

from sim.commands.sim_app import main

main()
