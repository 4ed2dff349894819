"""`outrider build-engine`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from outrider.commands.options import Grouped, In, sizes
from outrider.commands.output import bundle_table, console, progress_bar

ENGINES, BOTH, TENSORRT = "Engines", "For tensorrt-rtx and tensorrt", "For tensorrt"


def _capabilities(_: click.Context, __: click.Parameter, text: str | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(","))) if text is not None else ()


@click.command("build-engine", cls=Grouped)
@click.argument("source", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="BUNDLE",
    type=click.Path(path_type=Path),
    help="The folder to write; it must not exist.",
)
@click.option(
    "--backend",
    cls=In,
    group=ENGINES,
    type=click.Choice(["onnxruntime", "tensorrt-rtx", "tensorrt"]),
    default="onnxruntime",
    show_default=True,
)
@click.option(
    "--k",
    cls=In,
    group=ENGINES,
    callback=sizes,
    default="1,2,4,8",
    show_default=True,
    help="Numbers of draft tokens a round may have.",
)
@click.option(
    "--capacity",
    cls=In,
    group=ENGINES,
    type=int,
    help="Positions of the cache: prompt and answer together.  [default: 1024, or what the models allow]",
)
@click.option("--batch", cls=In, group=ENGINES, type=int, default=1, show_default=True, help="Sequences that may run at once.")
@click.option(
    "--max-prompt-chunk", cls=In, group=ENGINES, type=int, help="Longest run while reading a prompt, in tokens.  [default: 64]"
)
@click.option(
    "--compute-capability",
    cls=In,
    group=BOTH,
    callback=_capabilities,
    metavar="LIST",
    help="tensorrt-rtx only: the GPUs to build for, such as 8.9,12.0.  [default: 8.0 and newer]",
)
@click.option(
    "--workspace", cls=In, group=BOTH, type=float, metavar="GIB", help="GPU memory that one kernel may use for itself."
)
@click.option(
    "--optimization-level",
    cls=In,
    group=BOTH,
    type=click.IntRange(0, 5),
    help="How long to look for better kernels.  [default: the package's, 3]",
)
@click.option(
    "--verbosity",
    cls=In,
    group=BOTH,
    type=click.Choice(["error", "warning", "info", "verbose"]),
    help="Show TensorRT's own log on standard error, from this severity on.",
)
@click.option(
    "--timing-cache",
    cls=In,
    group=TENSORRT,
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Timings of earlier builds: read, and written back.",
)
@click.option(
    "--hardware-compatible", cls=In, group=TENSORRT, is_flag=True, help="Engines that run on other GPUs, too, from Ampere on."
)
@click.option(
    "--version-compatible", cls=In, group=TENSORRT, is_flag=True, help="Engines that newer releases of TensorRT run, too."
)
@click.option(
    "--device",
    cls=In,
    group=ENGINES,
    type=click.Choice(["cpu", "cuda"]),
    help="onnxruntime only: where to measure, and where it runs unless told otherwise.  [default: cpu]",
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
    """Build the engines of an exported pair into a bundle."""
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
