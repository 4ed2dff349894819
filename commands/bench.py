"""`outrider bench`."""

from __future__ import annotations

import shlex
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from outrider.commands.options import device, sizes
from outrider.commands.output import console, progress_bar
from outrider.errors import UsageError

if TYPE_CHECKING:
    from outrider.bench.results import Change, Results


@click.command("bench")
@click.argument("bundle", required=False, type=click.Path(path_type=Path))
@click.option(
    "--workload",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.jsonl",
    help='Prompts, {"workload": ..., "prompt": ...} a line.  [default: 20 that ship with outrider]',
)
@click.option("--each", type=click.IntRange(min=1), help="The first so many prompts of every workload.  [default: all]")
@click.option(
    "--k",
    callback=sizes,
    metavar="LIST",
    help="Numbers of tokens that the draft model drafts, or n-grams without one, to measure.  [default: all that were built]",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Times that all is measured; --compare needs 5, and Ctrl-C keeps the whole ones.",
)
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=64, show_default=True, help="The longest answer.")
@click.option("--chat", is_flag=True, help="Put the prompts into the bundle's chat template.")
@click.option(
    "--report",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write index.html, bench.md and bench.json.",
)
@click.option(
    "--compare",
    nargs=2,
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="A.json B.json",
    help="Measure nothing; say what got better or worse from A to B.",
)
@device
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON on standard output, and nothing else there.")
def command(
    bundle: Path | None,
    workload: Path | None,
    each: int | None,
    k: list[int] | None,
    rounds: int,
    max_new_tokens: int,
    chat: bool,
    report: Path | None,
    compare: tuple[Path, Path] | None,
    device: str | None,
    as_json: bool,
) -> None:
    """Measure plain decoding, each k of the draft model, n-grams and k = auto, by workload, side by side."""
    import msgspec

    if compare is not None:
        from outrider.bench.results import changes, read

        context = click.get_current_context()
        for name in sorted(set(context.params) - {"compare", "as_json"}):
            if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                option = "the bundle" if name == "bundle" else f"--{name.replace('_', '-')}"
                raise UsageError("--compare measures nothing", f"leave out {option}, or --compare")
        reports = [read(path) for path in compare]
        found = changes(*reports)
        measured = [{f"{each.workload}, {each.way.label}" for each in results.summaries} for results in reports]
        alone = [sorted(its - others) for its, others in zip(measured, reversed(measured), strict=True)]
        if as_json:
            click.echo(msgspec.json.encode({"changes": found, "only_before": alone[0], "only_after": alone[1]}).decode())
            return
        for name, path, of in zip(("before", "after"), compare, reports, strict=True):
            models = f"{of.target} drafted by {of.draft}" if of.draft else of.target
            click.echo(f"{name}: {path}, {models}, {of.precision}, {of.backend}, {of.rounds} rounds on {of.date}")
        console().print(_changes_table(found))
        for path, missing in zip(compare, alone, strict=True):
            if missing:
                click.echo(f"only in {path}: {'; '.join(missing)}")
        return
    if bundle is None:
        raise UsageError("no bundle is named", "give one, or --compare with two reports")
    from outrider.bench.measure import measure, ways
    from outrider.calibration.workloads import SHIPPED, load
    from outrider.runtime.generation import Outrider

    prompts = load(workload or SHIPPED, each)
    with progress_bar() as progress:
        loaded = Outrider.load(bundle, progress, device=device)
        ways(loaded, k)  # what is wrong with k is said before a folder is made
        if report is not None:
            from outrider.bench.report import prepare

            prepare(report)
        results = measure(
            loaded,
            prompts,
            k=k,
            rounds=rounds,
            max_new_tokens=max_new_tokens,
            chat=chat,
            bundle=str(bundle),
            command=shlex.join(["outrider", *sys.argv[1:]]),
            progress=progress,
        )
    if as_json:  # before the report, which a full disk may refuse
        click.echo(msgspec.json.encode(results).decode())
    else:
        screen = console()
        for table in _tables(results):
            screen.print(table)
    if report is not None:
        from outrider.bench.report import write

        write(report, results)
        if not as_json:
            click.echo(f"wrote {report / 'index.html'}")


def _tables(results: Results) -> list[Any]:
    from rich.table import Table

    from outrider.bench.report import HEADS, PROMISE_HEADS, promises, row
    from outrider.bench.simulator import REGRET_HEADS, regrets

    shown = (0, 1, 2, 3, 4, 5, 11)
    tables = []
    for workload in results.workloads:
        table = Table(*(HEADS[at] for at in shown), title=workload, title_justify="left")
        for summary in results.summaries:
            if summary.workload == workload:
                cells = row(summary)
                table.add_row(*(cells[at] for at in shown))
        tables.append(table)
    for title, heads, lines in (
        ("how well k was chosen and the speed-up predicted", PROMISE_HEADS, promises(results)),
        ("how k is chosen, replayed", REGRET_HEADS, regrets(results.policies)),
    ):
        table = Table(*heads, title=title, title_justify="left")
        for cells_of in lines:
            table.add_row(*cells_of)
        tables.append(table)
    return tables


def _changes_table(found: list[Change]) -> Any:
    from rich.table import Table

    from outrider.bench.report import spread
    from outrider.bench.results import FIRST_TOKEN

    chance = f"chance alone calls {len(found) / 126:.1f} of these {len(found)} better or worse"
    table = Table("workload", "way", "", "before", "after", "change", "", "mean acceptance length", caption=chance)
    for each in found:
        lengths = f"{each.length_before:.2f}"
        if round(each.length_before, 2) != round(each.length_after, 2):
            lengths += f" -> {each.length_after:.2f}"
        change = f"{statistics.median(each.after) / statistics.median(each.before) - 1:+.1%}"
        digits = {FIRST_TOKEN: 0, "tokens/s": 1}.get(each.unit, 2)
        speeds = (spread(speeds, digits) for speeds in (each.before, each.after))
        table.add_row(each.workload, each.way.label, each.unit, *speeds, change, each.verdict, lengths)
    return table
