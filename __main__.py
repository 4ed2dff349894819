"""Run `python -m outrider` like the command `outrider`."""

from outrider.cli import main

main()
