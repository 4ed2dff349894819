"""The command line: one subcommand per mode."""

from __future__ import annotations

from importlib import import_module

import click

MODES = (
    "answers",
    "halves",
    "hops",
    "host",
    "kernels",
    "masks",
    "passes",
    "perplexity",
    "plain",
    "prefixes",
    "quotes",
    "reading",
    "rows",
    "rules",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure one thing about a bundle: python -m outrider.experiments.measure MODE BUNDLE."""


for mode in MODES:
    main.add_command(import_module(f"outrider.experiments.measure.{mode}").command, mode)

if __name__ == "__main__":
    main(prog_name="measure")
