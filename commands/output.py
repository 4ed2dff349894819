"""What commands print: tables, and progress on what takes long."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from outrider.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    from outrider.bundle.manifest import Manifest


def console() -> Console:
    """Standard output, for text that is nobody's markup: names of workloads and models are anything."""
    from rich.console import Console

    usual: Any = {"markup": False, "emoji": False}
    return Console(soft_wrap=True, **usual) if sys.stdout.isatty() else Console(width=100, soft_wrap=False, **usual)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on a terminal's standard error, one plain line a stage elsewhere."""
    if not sys.stderr.isatty():
        yield Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
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


def bundle_table(manifest: Manifest) -> Any:
    from rich.table import Table

    from outrider.bundle.manifest import engine_file

    roles = manifest.roles
    table = Table("", *roles, title="models", title_justify="left")
    models = [manifest.models[role] for role in roles]
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
        table.add_row("backend", f"{build.backend} {build.backend_version}, {build.device}")
        table.add_row("k", ", ".join(str(k) for k in build.k))
        table.add_row("capacity, batch", f"{build.capacity}, {build.batch}")
        table.add_row("longest prompt chunk", str(build.max_prompt_chunk))
        table.add_row("windows", ", ".join(str(window) for window in build.windows))
        if build.acceptance:
            rates = ", ".join(f"{name} {rate:.0%}" for name, rate in build.acceptance.items())
            table.add_row("acceptance on shipped prompts", rates)
        if build.rewrites:
            counts = [build.rewrites.get(role, {}) for role in roles]
            table.add_row("fused", *(", ".join(f"{count} {name}" for name, count in each.items()) or "no" for each in counts))
        if build.profiles:
            table.add_row("compute capabilities", ", ".join(build.compute_capabilities) or "the package's default")
            table.add_section()
        for name in manifest.engines if build.profiles else ():
            spans = ", ".join(str(most) if least == most else f"{least}-{most}" for least, most in build.rows(name))
            table.add_row(f"{name}, rows", f"{spans}; {manifest.files[engine_file(name)].size:,} bytes")
        table.add_section()
        measured = [{(c.batch, c.window, c.rows): c for c in build.costs.get(role, [])} for role in roles]
        ends = {build.windows[0], build.windows[-1]}
        for at in sorted(set.intersection(*map(set, measured))):
            batch, window, rows = at
            if window in ends:
                of = f" of {batch} sequences" if batch > 1 else ""
                costs = (f"{c[at].median:.2f} ({c[at].fastest:.2f}-{c[at].slowest:.2f})" for c in measured)
                table.add_row(f"{rows} rows{of}, window {window}, ms", *costs)
    return table
