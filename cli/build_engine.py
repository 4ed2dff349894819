"""`outrider build-engine`."""

from __future__ import annotations

from pathlib import Path

import click

from outrider.cli.show import bundle_table, console, progress_bar


def _sizes(_: click.Context, __: click.Parameter, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} is no list of numbers such as 1,2,4,8") from None


@click.command("build-engine")
@click.argument("source", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="BUNDLE",
    type=click.Path(path_type=Path),
    help="The folder to write; it must not exist.",
)
@click.option("--backend", type=click.Choice(["onnxruntime"]), default="onnxruntime", show_default=True)
@click.option("--k", callback=_sizes, default="1,2,4,8", show_default=True, help="Numbers of draft tokens a round may have.")
@click.option(
    "--capacity",
    type=int,
    help="Positions of the cache: prompt and answer together.  [default: 1024, or what the models allow]",
)
@click.option("--batch", type=int, default=1, show_default=True, help="Sequences that may run at once.")
@click.option("--max-prompt-chunk", type=int, help="Longest run while reading a prompt, in tokens.  [default: 64]")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest on standard output.")
def command(
    source: Path,
    output: Path,
    backend: str,
    k: list[int],
    capacity: int | None,
    batch: int,
    max_prompt_chunk: int | None,
    as_json: bool,
) -> None:
    """Build the engines of an exported pair into a bundle."""
    from outrider.builder.build import build_engine

    with progress_bar() as progress:
        manifest = build_engine(
            source,
            output,
            backend=backend,
            k=k,
            capacity=capacity,
            batch=batch,
            max_prompt_chunk=max_prompt_chunk,
            progress=progress,
        )
    if as_json:
        click.echo(manifest.encode().decode(), nl=False)
    else:
        console().print(bundle_table(manifest))
        click.echo(f"wrote {output}")
