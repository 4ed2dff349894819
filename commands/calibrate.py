"""`outrider calibrate`."""

from __future__ import annotations

from pathlib import Path

import click

from outrider.backends import registry
from outrider.commands.options import Registered
from outrider.commands.output import bundle_table, console, progress_bar


@click.command("calibrate")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--device",
    type=Registered(registry.devices),
    help="The device to measure on, if the backend has a choice, and to run on by default from then on.  [default: unchanged]",
)
def command(bundle: Path, device: str | None) -> None:
    """Measure the costs of a bundle's passes on this machine, and write them into the bundle.

    build-engine measures them on the machine where it builds. The machine where the bundle runs may have other costs, and k is
    chosen by them.
    """
    from outrider.builder.build import calibrate

    with progress_bar() as progress:
        manifest = calibrate(bundle, progress, device)
    console().print(bundle_table(manifest))
    click.echo(f"wrote {bundle / 'manifest.json'}")
