"""`outrider build-engine`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from outrider.commands.options import GroupedCommand, GroupedOption, backend, sizes
from outrider.commands.output import bundle_table, console, progress_bar

ENGINES, BOTH, TENSORRT = "Engines", "Backends tensorrt-rtx and tensorrt", "Backend tensorrt"


def _capabilities(_: click.Context, __: click.Parameter, text: str | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(","))) if text is not None else ()


@click.command("build-engine", cls=GroupedCommand)
@click.argument("source", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="BUNDLE",
    type=click.Path(path_type=Path),
    help="The folder to write; it must not exist.",
)
@backend
@click.option(
    "--k",
    cls=GroupedOption,
    group=ENGINES,
    callback=sizes,
    metavar="LIST",
    default="1,2,4,8",
    show_default=True,
    help="Numbers of draft tokens per round to build for.",
)
@click.option(
    "--capacity",
    cls=GroupedOption,
    group=ENGINES,
    type=int,
    help="Cache size in tokens, for prompt and answer together.  [default: 1024, or what the models allow]",
)
@click.option(
    "--batch",
    cls=GroupedOption,
    group=ENGINES,
    type=int,
    default=1,
    show_default=True,
    help="Maximum number of sequences in a batch.",
)
@click.option(
    "--max-prompt-chunk",
    cls=GroupedOption,
    group=ENGINES,
    type=int,
    help="Maximum number of prompt tokens per prefill pass.  [default: 64]",
)
@click.option(
    "--compute-capability",
    cls=GroupedOption,
    group=BOTH,
    callback=_capabilities,
    metavar="LIST",
    help="tensorrt-rtx only: compute capabilities to build for, such as 8.9,12.0.  [default: 8.0 and newer]",
)
@click.option(
    "--workspace",
    cls=GroupedOption,
    group=BOTH,
    type=float,
    metavar="GIB",
    help="Maximum GPU memory that a kernel may use as workspace.",
)
@click.option(
    "--optimization-level",
    cls=GroupedOption,
    group=BOTH,
    type=click.IntRange(0, 5),
    help="How much time to spend on finding faster kernels.  [default: 3, the package's own]",
)
@click.option(
    "--verbosity",
    cls=GroupedOption,
    group=BOTH,
    type=click.Choice(["error", "warning", "info", "verbose"]),
    help="Print TensorRT's log on standard error, at this severity and above.",
)
@click.option(
    "--timing-cache",
    cls=GroupedOption,
    group=TENSORRT,
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Cache of kernel timings from earlier builds; read, and updated.",
)
@click.option(
    "--hardware-compatible",
    cls=GroupedOption,
    group=TENSORRT,
    is_flag=True,
    help="Build engines that also run on other GPUs, from Ampere on.",
)
@click.option(
    "--version-compatible",
    cls=GroupedOption,
    group=TENSORRT,
    is_flag=True,
    help="Build engines that newer releases of TensorRT also run.",
)
@click.option(
    "--device",
    cls=GroupedOption,
    group=ENGINES,
    type=click.Choice(["cpu", "cuda"]),
    help="onnxruntime only: the device to measure on, and to run on by default.  [default: cpu]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the manifest on standard output.")
def command(
    source: Path,
    output: Path,
    backend: str,
    k: list[int],
    capacity: int | None,
    batch: int,
    max_prompt_chunk: int | None,
    device: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Build the engines of an exported pair, and write them as a bundle."""
    from outrider.backends.tensorrt.build import Options
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
            device=device,
            options=Options(**options),
            progress=progress,
        )
    if as_json:
        click.echo(manifest.encode().decode(), nl=False)
    else:
        console().print(bundle_table(manifest))
        click.echo(f"wrote {output}")
