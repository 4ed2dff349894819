"""`outrider calibrate`."""

from __future__ import annotations

from pathlib import Path

import click

from outrider.commands.output import bundle_table, console, progress_bar


@click.command("calibrate")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="Where an onnxruntime bundle is measured, and runs from then on unless told otherwise.  [default: as before]",
)
def command(bundle: Path, device: str | None) -> None:
    """Measure on this machine what every pass of a bundle costs, and write it into the bundle.

    `build-engine` does it where it builds; where the bundle runs, costs may be others, and k is chosen by them.
    """
    from outrider.builder.build import calibrate

    with progress_bar() as progress:
        manifest = calibrate(bundle, progress, device)
    console().print(bundle_table(manifest))
    click.echo(f"wrote {bundle / 'manifest.json'}")
