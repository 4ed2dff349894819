"""Run `python -m outrider` like the command `outrider`."""

import sys


def run() -> None:
    """Run the command line. An interrupt may arrive while it is imported."""
    try:
        from outrider.cli import main
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
    main()


if __name__ == "__main__":
    run()
