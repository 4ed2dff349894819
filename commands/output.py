"""Tables and progress bars that commands print."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from outrider.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress as Bars
    from rich.progress import Task, TaskID
    from rich.text import Text

    from outrider.bundle.manifest import Build, Cost, Manifest, Model
    from outrider.runtime.text.stream import Piece


def printable(text: str) -> str:
    """Escape all characters that a terminal might obey instead of showing them, except line breaks and tabs."""
    return "".join(each if each.isprintable() or each in "\n\t" else ascii(each)[1:-1] for each in text)


def print_json(encoded: bytes) -> None:
    """Print JSON on standard output in ASCII, because a terminal obeys some other characters."""
    click.echo(re.sub(r"[^\n -~]", lambda found: json.dumps(found[0])[1:-1], encoded.decode()).removesuffix("\n"))


def console() -> Console:
    """Return a console on standard output. Markup is off, because names of workloads and models may contain it."""
    from rich.console import Console

    class Escaping(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

    options: Any = {"soft_wrap": True} if sys.stdout.isatty() else {"width": 100, "soft_wrap": False}
    return Escaping(markup=False, emoji=False, **options)


def print_pieces(pieces: Iterable[Piece], screen: Console | None, terminal: bool) -> None:
    """Print new text of an answer, on a screen in colours that tell drafted tokens from the target's own.

    Args:
        screen: a `console`; None prints without colours.
        terminal: whether standard output is a terminal, on which characters that it might obey are escaped.
    """
    for text, from_draft in pieces:
        text = printable(text) if terminal else text
        if screen is None:
            click.echo(text.encode("utf-8", "replace"), nl=False)
        else:
            screen.out(text, style="green" if from_draft else "yellow", highlight=False, end="")


@contextmanager
def standard_error_discarded() -> Iterator[None]:
    """Discard standard error: a tokenizer that fails prints its stack there before it raises an exception."""
    sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # the parent process closed it
        yield
        return
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Report progress on standard error: as a bar on a terminal, as one line per stage elsewhere.

    An interrupt ends the command, wherever it arrives.
    """
    if not sys.stderr.isatty():
        with _interrupts():
            yield Lines()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        ProgressColumn,
        SpinnerColumn,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bars

    class IfKnown(ProgressColumn):
        """A column of stages whose total is known."""

        def __init__(self, column: ProgressColumn):
            super().__init__()
            self._column = column

        def render(self, task: Task) -> RenderableType:
            return "" if task.total is None else self._column(task)

    name = TextColumn("{task.description}", markup=False)
    bar, share, remaining = map(IfKnown, (BarColumn(), TaskProgressColumn(), TimeRemainingColumn()))
    columns = (SpinnerColumn(), name, bar, share, TimeElapsedColumn(), remaining)
    with (
        Bars(*columns, console=Console(stderr=True), transient=True) as bars,
        _interrupts(),
    ):
        yield Bar(bars, bars.add_task("", total=None))


@contextmanager
def _interrupts() -> Iterator[None]:
    """Repeat an interrupt that arrived where Python cannot raise an exception: in a destructor, or in a torch callback."""

    def ignored(report: sys.UnraisableHookArgs) -> None:
        if report.exc_type is not KeyboardInterrupt:
            previous(report)
            return
        again = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT))
        again.daemon = True
        again.start()

    previous, sys.unraisablehook = sys.unraisablehook, ignored
    try:
        yield
    finally:
        sys.unraisablehook = previous


class Lines(Progress):
    """Progress as one line per stage."""

    def stage(self, name: str, total: int | None = None) -> None:
        click.echo(f"{printable(name)} ...", err=True)

    def note(self, text: str) -> None:
        click.echo(printable(text), err=True)


class Bar(Progress):
    """Progress as one line, which restarts with each stage. It has a bar if the total is known."""

    def __init__(self, bars: Bars, task: TaskID):
        self._bars, self._task = bars, task

    def stage(self, name: str, total: int | None = None) -> None:
        self._bars.reset(self._task, description=printable(name), total=total)

    def advance(self, size: int) -> None:
        self._bars.advance(self._task, size)

    def note(self, text: str) -> None:
        self._bars.update(self._task, description=printable(text))


def bundle_table(manifest: Manifest) -> Any:
    """Return a table of a bundle's models, build and measured costs."""
    from rich.table import Table

    roles = manifest.roles
    models = [manifest.models[role] for role in roles]
    table = Table("", *roles, title="models", title_justify="left")
    table.add_row("source", *(model.source for model in models))
    if any(model.adapters for model in models):
        table.add_row("adapters", *(model.merged for model in models))
    table.add_row("architecture", *(model.architecture for model in models))
    table.add_row("parameters", *(f"{model.parameters:,}" for model in models))
    table.add_row("precision", *(model.precision for model in models))
    table.add_row("rows of logits", *(f"{model.vocab_rows:,}" for model in models))
    table.add_row("max positions", *(f"{model.max_positions:,}" if model.max_positions else "any" for model in models))
    table.add_row("layers", *(_layers(model) for model in models))
    table.add_row("max logit difference", *(f"{model.parity.max_abs_diff:.1e}" for model in models))
    table.add_section()
    table.add_row("schema, contract", f"{manifest.schema_version}, {manifest.contract_version}")
    table.add_row("outrider", manifest.outrider_version)
    table.add_row("tokens", f"{manifest.vocab_tokens:,}")
    table.add_row("end of text", ", ".join(str(token) for token in manifest.generation.eos_token_ids) or "none")
    if manifest.build is not None:
        _add_build(table, manifest, manifest.build)
        table.add_section()
        _add_costs(table, roles, manifest.build)
    return table


def costs_note(timed: int, fitted: int) -> str:
    """Say how many costs of a bundle were timed, and how many fitted."""
    return f"{timed} passes timed, {fitted} fitted; outrider calibrate times all of them" if fitted else f"{timed} passes timed"


def _layers(model: Model) -> str:
    attention = str(len(model.layers))
    return f"{attention} with attention, {len(model.recurrent)} recurrent" if model.recurrent else attention


def _slot(model: Model, build: Build, reads_features: bool) -> str:
    """Return the size of one sequence in a model's cache, including snapshots of its recurrent states. Features count as part
    of the target's cache."""
    from outrider.builder.defaults import cache_bytes
    from outrider.engines.session import SNAPSHOTS

    positional, states = cache_bytes(model, build.capacity, build.k, reads_features=reads_features)
    total = f"{positional + states:,} bytes"
    return f"{total}, {states:,} of them recurrent states and {SNAPSHOTS} snapshots" if model.recurrent else total


def _add_build(table: Any, manifest: Manifest, build: Build) -> None:
    from outrider.backends import registry
    from outrider.builder.defaults import cache_bytes
    from outrider.bundle.manifest import READS_FEATURES

    table.add_row("backend", f"{build.backend} {build.backend_version}, {build.device}")
    table.add_row("k", ", ".join(str(k) for k in build.k))
    table.add_row("capacity, batch", f"{build.capacity}, {build.batch}")
    slots = (_slot(manifest.models[role], build, role in READS_FEATURES) for role in manifest.roles)
    table.add_row("cache per sequence", *slots)
    for number, stage in enumerate(build.stages, 1):
        cache = sum(cache_bytes(manifest.models["target"], build.capacity, build.k, reads_features=False, stage=stage))
        cell = f"{stage.bytes:,} bytes of weights, {cache:,} bytes of cache per sequence"
        place = [
            *([stage.device] if stage.device else []),
            *([f"{stage.threads} thread{'s' * (stage.threads > 1)}"] if stage.threads else []),
        ]
        cell += f", on {', '.join(place)}" if place else ""
        cell += f", by {stage.backend.name} {stage.backend.version}" if stage.backend else ""
        table.add_row("stage {}, layers {}-{}".format(number, *stage.layers), cell)
    if build.draft_device is not None:
        table.add_row("device of draft models", build.draft_device)
    table.add_row("max prompt chunk", str(build.max_prompt_chunk))
    table.add_row("windows", ", ".join(str(window) for window in build.windows))
    if build.acceptance:
        rates = ", ".join(f"{name} {rate:.0%}" for name, rate in build.acceptance.items())
        table.add_row("acceptance on shipped prompts", rates)
    if build.costs:
        table.add_row("costs", costs_note(*build.timed))
    if build.rewrites:
        rewrites = [build.rewrites.get(role, {}) for role in manifest.roles]
        table.add_row("fused", *(", ".join(f"{count} {name}" for name, count in each.items()) or "no" for each in rewrites))
    if build.profiles:
        table.add_row("compute capabilities", ", ".join(build.compute_capabilities) or "the package's default")
        table.add_section()
        for name in manifest.engines:
            ranges = ", ".join(str(high) if low == high else f"{low}-{high}" for low, high in build.rows(name))
            size = sum(manifest.files[file].size for file in registry.get(build.backend).engine_files(name))
            table.add_row(f"{name}, rows", f"{ranges}; {size:,} bytes")


def _add_costs(table: Any, roles: Sequence[str], build: Build) -> None:
    """Add the costs in the smallest and the largest window."""
    costs = [{(c.batch, c.window, c.rows): c for c in build.costs.get(role, [])} for role in roles]
    for key in sorted(set.intersection(*map(set, costs))):
        batch, window, rows = key
        if window in (build.windows[0], build.windows[-1]):
            sequences = f" of {batch} sequences" if batch > 1 else ""
            table.add_row(
                f"{rows} row{'s' if rows > 1 else ''}{sequences}, window {window}, ms", *(_cell(c[key]) for c in costs)
            )


def _cell(cost: Cost) -> str:
    return f"{cost.median:.2f} ({f'{cost.fastest:.2f}-{cost.slowest:.2f}' if cost.runs else 'fitted'})"
