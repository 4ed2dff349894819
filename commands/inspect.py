"""`outrider inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.commands.output import bundle_table, console, print_json, progress_bar

if TYPE_CHECKING:
    from outrider.bundle.manifest import Manifest


@click.command("inspect")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the manifest on standard output.")
def command(bundle: Path, as_json: bool) -> None:
    """Show the contents of a bundle, and check every file's digest."""
    from outrider.backends.open import open_bundle

    with progress_bar() as progress:
        manifest, _ = open_bundle(bundle, progress)
    if as_json:
        print_json(manifest.encode())
        return
    screen = console()
    screen.print(bundle_table(manifest))
    screen.print(_file_table(manifest))
    click.echo("all files match their digests")


def _file_table(manifest: Manifest) -> Any:
    from rich.table import Table

    table = Table("file", "bytes", "sha256", title="files", title_justify="left")
    for name, entry in manifest.files.items():
        table.add_row(name, f"{entry.size:,}", entry.sha256[:16])
    return table
