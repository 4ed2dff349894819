"""Arguments that several modes share."""

from __future__ import annotations

from pathlib import Path

import click

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)

bundle = click.argument("bundle", type=FOLDER)
repeat = click.option("--repeat", type=click.IntRange(1), default=5, show_default=True, help="Number of measurements.")
