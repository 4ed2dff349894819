"""Options that several commands have."""

from __future__ import annotations

import click

device = click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="Where an onnxruntime bundle runs.  [default: where it was built]",
)
