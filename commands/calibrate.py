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
    help="The device to measure on. It becomes the device that the bundle runs on by default.  [default: unchanged]",
)
def command(bundle: Path, device: str | None) -> None:
    """Measure the costs of all of a bundle's passes on this machine, and write them into the bundle.

    build-engine times some passes on the machine where it builds, and fits the costs of the others. Run calibrate if the bundle
    runs on another machine, because k = auto starts from the costs, or for better predictions of outrider plan.
    """
    from outrider.builder.build import calibrate

    with progress_bar() as progress:
        manifest = calibrate(bundle, progress, device)
    console().print(bundle_table(manifest))
    click.echo(f"wrote {bundle / 'manifest.json'}")
