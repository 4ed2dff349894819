"""The command line: one command per stage. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

import outrider
from outrider.engines.errors import OutriderError, UsageError
from outrider.engines.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    from outrider.engines.manifest import Manifest
    from outrider.runtime.generation import Event


class Commands(click.Group):
    """Turns expected failures into one line and the mend: exit code 2 for wrong use, 1 for failure."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OutriderError as error:
            _fail(ctx, str(error), error.mend, error.exit_code)
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx else "outrider"
            _fail(ctx, error.format_message(), f"see {command} --help", error.exit_code)
        except ImportError as error:
            if error.name is None or error.name.startswith("outrider"):
                raise
            message = f"this command needs the package {error.name}, which is not installed"
            _fail(ctx, message, "pip install 'outrider[export,cpu]'")
        except MemoryError:
            _fail(ctx, "out of memory", "use a smaller model, precision, capacity or batch")
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader has seen enough; click ends quietly
                raise
            # What is left in the buffer would fail once more when Python ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            _fail(ctx, f"input or output failed: {error}", "check where standard input and output lead")


def _fail(ctx: click.Context, message: str, mend: str, code: int = 1) -> NoReturn:
    click.echo(f"error: {_one_line(message)}", err=True)
    click.echo(f"mend:  {_one_line(mend)}", err=True)
    ctx.exit(code)


def _one_line(text: str) -> str:
    return " ".join(text.split())


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(outrider.__version__)
def main() -> None:
    """Compile a draft and a target language model into engines, and run them with speculative decoding.

    The stages, in order: export, build-engine, generate.
    """
    if sys.stderr is None:  # closed by whoever started us
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # for the life of the process
    if sys.stdout is None:
        raise UsageError("standard output is closed", "lead it somewhere, /dev/null if need be")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows a question mark


@main.command()
@click.option(
    "--target", required=True, metavar="SOURCE", help="The big model: a Hugging Face folder, a hub id, or a GGUF file."
)
@click.option("--draft", required=True, metavar="SOURCE", help="The small model, of the same vocabulary.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The folder to write; it must not exist.")
@click.option("--precision", type=click.Choice(["fp32", "fp16", "bf16"]), default="fp32", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the manifest on standard output.")
def export(target: str, draft: str, output: Path, precision: str, as_json: bool) -> None:
    """Export a checkpoint pair as standard ONNX, each graph checked against its checkpoint."""
    from outrider.export.pair import export_pair

    with _progress() as progress:
        manifest = export_pair(target, draft, output, precision=precision, progress=progress)
    if as_json:
        click.echo(manifest.encode().decode(), nl=False)
        return
    for role, model in manifest.models.items():
        click.echo(
            f"{role}: {model.architecture}, {model.parameters:,} parameters, {precision}; logits within"
            f" {model.parity.max_abs_diff:.1e} of the checkpoint (allowed {model.parity.tolerance:.1e}),"
            f" same argmax in {model.parity.argmax_agreement:.0%} of {model.parity.rows} rows"
        )
    click.echo(f"wrote {output}")


def _sizes(_: click.Context, __: click.Parameter, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} is no list of numbers such as 1,2,4,8") from None


@main.command("build-engine")
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
def build_engine(
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
    from outrider.builder.build import build_engine as build

    with _progress() as progress:
        manifest = build(
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
        _console().print(_build_table(manifest))
        click.echo(f"wrote {output}")


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompt", metavar="TEXT", help="The prompt; without it, standard input is read to its end.")
@click.option("--chat", is_flag=True, help="Put the prompt into the bundle's chat template.")
@click.option("--max-new-tokens", type=int, default=256, show_default=True)
@click.option(
    "--k", type=int, help="Draft tokens a round: one of the built numbers, or 0 for plain decoding.  [default: up to 4]"
)
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text. May be given more than once.")
@click.option("--show", is_flag=True, help="Colour the text by origin, and end with a line of figures.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output, and nothing else there.")
def generate(
    bundle: Path,
    prompt: str | None,
    chat: bool,
    max_new_tokens: int,
    k: int | None,
    stop: tuple[str, ...],
    show: bool,
    as_json: bool,
) -> None:
    """Continue a prompt. Only confirmed tokens are ever printed."""
    if show and as_json:
        raise UsageError("--show and --json exclude each other", "choose one")
    from outrider.runtime.generation import Outrider

    text = _read_prompt() if prompt is None else prompt
    with _progress() as progress:
        loaded = Outrider.load(bundle, progress)
    events = loaded.generate(text, max_new_tokens=max_new_tokens, k=k, stop=stop, chat=chat)
    if as_json:
        _print_json(events)
    else:
        _print_text(events, show)


def _read_prompt() -> str:
    if sys.stdin is None:  # closed by whoever started us
        raise UsageError("there is no prompt: standard input is closed", "give one with --prompt")
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError("the prompt on standard input is not UTF-8 text", "convert it to UTF-8") from error


def _print_text(events: Iterator[Event], show: bool) -> None:
    console = _console() if show else None
    event = None
    for event in events:
        for text, from_draft in event.pieces:
            if console is None:
                click.echo(text.encode("utf-8", "replace"), nl=False)
            else:
                console.out(text, style="green" if from_draft else "yellow", highlight=False, end="")
    click.echo()
    assert event is not None  # a generation has at least one round
    if event.finish_reason == "capacity":
        click.echo("stopped: the bundle's capacity is full; build with a larger --capacity for longer texts", err=True)
    if console is not None:
        if console.is_terminal:
            console.print("[green]accepted draft[/green]  [yellow]target's own[/yellow]", highlight=False)
        click.echo(event.stats.line())


def _print_json(events: Iterator[Event]) -> None:
    ids: list[int] = []
    from_draft: list[bool] = []
    text = ""
    event = None
    for event in events:
        ids += event.token_ids
        from_draft += event.from_draft
        text += event.text
    assert event is not None  # a generation has at least one round
    click.echo(
        json.dumps(
            {
                "text": text,
                "token_ids": ids,
                "from_draft": from_draft,
                "finish_reason": event.finish_reason,
                "stats": event.stats.as_dict(),
            }
        )
    )


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as it is.")
def inspect(bundle: Path, as_json: bool) -> None:
    """Show what a bundle holds, and check every file's digest."""
    from outrider.engines.bundle import open_bundle

    with _progress() as progress:
        manifest, _ = open_bundle(bundle, progress)
    if as_json:
        click.echo(manifest.encode().decode(), nl=False)
        return
    console = _console()
    console.print(_build_table(manifest))
    console.print(_file_table(manifest))
    click.echo("every file is as it was sealed")


def _build_table(manifest: Manifest) -> Any:
    from rich.table import Table

    from outrider.engines.manifest import ROLES

    table = Table("", *ROLES, title="models", title_justify="left")
    models = [manifest.models[role] for role in ROLES]
    table.add_row("source", *(model.source for model in models))
    table.add_row("architecture", *(model.architecture for model in models))
    table.add_row("parameters", *(f"{model.parameters:,}" for model in models))
    table.add_row("precision", *(model.precision for model in models))
    table.add_row("rows of logits", *(f"{model.vocab_rows:,}" for model in models))
    table.add_row("positions made for", *(f"{model.max_positions:,}" if model.max_positions else "any" for model in models))
    table.add_row("layers", *(str(len(model.layers)) for model in models))
    table.add_row("logits off the checkpoint's", *(f"{model.parity.max_abs_diff:.1e}" for model in models))
    table.add_section()
    table.add_row("schema, contract", f"{manifest.schema_version}, {manifest.contract_version}")
    table.add_row("outrider", manifest.outrider_version)
    table.add_row("tokens", f"{manifest.vocab_tokens:,}")
    table.add_row("end of text", ", ".join(str(token) for token in manifest.generation.eos_token_ids) or "none")
    build = manifest.build
    if build is not None:
        table.add_row("backend", f"{build.backend} {build.backend_version}", build.device)
        table.add_row("k", ", ".join(str(k) for k in build.k))
        table.add_row("capacity, batch", f"{build.capacity}, {build.batch}")
        table.add_row("longest prompt chunk", str(build.max_prompt_chunk))
        table.add_row("windows", ", ".join(str(window) for window in build.windows))
        table.add_section()
        for rows in sorted(build.costs["target"].keys() & build.costs["draft"].keys(), key=int):
            costs = [build.costs[role][rows] for role in ROLES]
            table.add_row(f"{rows} rows, ms", *(f"{c.median:.2f} ({c.fastest:.2f}-{c.slowest:.2f})" for c in costs))
    return table


def _file_table(manifest: Manifest) -> Any:
    from rich.table import Table

    table = Table("file", "bytes", "sha256", title="files", title_justify="left")
    for name, entry in manifest.files.items():
        table.add_row(name, f"{entry.size:,}", entry.sha256[:16])
    return table


def _console() -> Console:
    from rich.console import Console

    return Console(soft_wrap=True) if sys.stdout.isatty() else Console(width=100, soft_wrap=False)


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on a terminal's standard error, one plain line a stage elsewhere."""
    if not sys.stderr.isatty():
        yield Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        yield Bar(bars, bars.add_task("", total=None))


class Lines(Progress):
    """One line a stage."""

    def stage(self, name: str, total: int | None = None) -> None:
        click.echo(f"{name} ...", err=True)


class Bar(Progress):
    """One bar, which begins anew with each stage; it only pulses where the total is not known."""

    def __init__(self, bars: Bars, task: TaskID):
        self._bars, self._task = bars, task

    def stage(self, name: str, total: int | None = None) -> None:
        self._bars.reset(self._task, description=name, total=total)

    def advance(self, size: int) -> None:
        self._bars.advance(self._task, size)
