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
from outrider.commands.output import console, print_json, printable, progress_bar
from outrider.errors import UsageError

if TYPE_CHECKING:
    from outrider.bench.results import Change, Results

SCREEN_COLUMNS = (0, 1, 2, 3, 4, 5, 6, 12)  # the columns of `report.HEADS` to print; the report has all of them


@click.command("bench")
@click.argument("bundle", required=False, type=click.Path(path_type=Path))
@click.option(
    "--workload",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.jsonl",
    help='Prompts: one {"workload": ..., "prompt": ...} per line.  [default: 20 that ship with outrider]',
)
@click.option("--each", type=click.IntRange(min=1), help="Use only this many prompts of each workload.  [default: all]")
@click.option(
    "--k",
    callback=sizes,
    metavar="LIST",
    help="Values of k to measure with a draft model or head; 0 for only plain decoding and k = auto.  [default: all that were"
    " built]",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Number of rounds; --compare needs 5. Ctrl-C ends the run and keeps the complete rounds.",
)
@click.option(
    "--max-new-tokens", type=click.IntRange(min=2), default=64, show_default=True, help="Maximum number of new tokens."
)
@click.option("--chat", is_flag=True, help="Apply the bundle's chat template to the prompts.")
@click.option(
    "--report",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write bench.md and bench.json into this folder.",
)
@click.option(
    "--compare",
    nargs=2,
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="A.json B.json",
    help="Compare two reports instead of measuring: what got better or worse from A to B.",
)
@device
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output, and nothing else.")
def command(
    bundle: Path | None,
    workload: Path | None,
    each: int | None,
    report: Path | None,
    compare: tuple[Path, Path] | None,
    device: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure plain decoding, each k of every drafter on the device, n-grams and k = auto side by side, by workload."""
    if compare is not None:
        _compare(*compare, as_json)
        return
    if bundle is None:
        raise UsageError("no bundle was given", "pass one, or use --compare with two reports")
    import msgspec

    results = _measure(bundle, workload, each, report, device, options)
    if as_json:  # printed before the report is written, which may fail on a full disk
        print_json(msgspec.json.encode(results))
    else:
        screen = console()
        for table in _tables(results):
            screen.print(table)
    if report is not None:
        from outrider.bench.report import write

        write(report, results)
        if not as_json:
            click.echo(f"wrote {report / 'bench.md'}")


def _measure(
    bundle: Path, workload: Path | None, each: int | None, report: Path | None, device: str | None, options: dict[str, Any]
) -> Results:
    from outrider.bench.measure import measure, modes
    from outrider.builder.workloads import SHIPPED, load
    from outrider.runtime.generation import Outrider

    prompts = load(workload or SHIPPED, each)
    with progress_bar() as progress:
        loaded = Outrider.load(bundle, progress, device=device)
        modes(loaded, options["k"])  # a wrong k is refused before the report's folder is created
        if report is not None:
            from outrider.bench.report import prepare

            prepare(report)
        command = shlex.join(["outrider", *sys.argv[1:]])
        return measure(loaded, prompts, bundle=str(bundle), command=command, progress=progress, **options)


def _compare(before: Path, after: Path, as_json: bool) -> None:
    import msgspec

    from outrider.bench.results import changes, read

    context = click.get_current_context()
    for name in sorted(set(context.params) - {"compare", "as_json"}):
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = "the bundle" if name == "bundle" else f"--{name.replace('_', '-')}"
            raise UsageError("--compare reads two reports and measures nothing", f"leave out {option}, or --compare")
    paths, reports = (before, after), (read(before), read(after))
    compared = changes(*reports)
    measured = [{f"{summary.workload}, {summary.mode.label}" for summary in results.summaries} for results in reports]
    only_before, only_after = sorted(measured[0] - measured[1]), sorted(measured[1] - measured[0])
    if as_json:
        result = {"changes": compared, "only_before": only_before, "only_after": only_after}
        print_json(msgspec.json.encode(result))
        return
    for name, path, results in zip(("before", "after"), paths, reports, strict=True):
        models = f"{results.target} drafted by {' and '.join(results.drafts)}" if results.drafts else results.target
        what = f"{models}, {results.precision}, {results.backend}, {results.rounds} rounds on {results.date}"
        click.echo(printable(f"{name}: {path}, {what}"))
    console().print(_changes_table(compared))
    for path, missing in zip(paths, (only_before, only_after), strict=True):
        if missing:
            click.echo(printable(f"only in {path}: {'; '.join(missing)}"))


def _tables(results: Results) -> list[Any]:
    from rich.table import Table

    from outrider.bench.report import ASSESSMENT_HEADS, HEADS, assessment, row, whole_answers, whole_heads
    from outrider.bench.simulator import REGRET_HEADS, regrets

    tables = []
    for workload in results.workloads:
        table = Table(*(HEADS[at] for at in SCREEN_COLUMNS), title=workload, title_justify="left")
        for summary in results.summaries:
            if summary.workload == workload:
                summary_cells = row(summary)
                table.add_row(*(summary_cells[at] for at in SCREEN_COLUMNS))
        tables.append(table)
    for title, heads, rows in (
        ("whole answers: seconds from the request to a number of tokens", whole_heads(results), whole_answers(results)),
        ("choice of k, and accuracy of the prediction", ASSESSMENT_HEADS, assessment(results)),
        ("choice of k, replayed", REGRET_HEADS, regrets(results.policies)),
    ):
        table = Table(*heads, title=title, title_justify="left")
        for cells in rows:
            table.add_row(*cells)
        tables.append(table)
    return tables


def _changes_table(changes: list[Change]) -> Any:
    from rich.table import Table

    from outrider.bench.report import spread
    from outrider.bench.results import FIRST_TOKEN

    chance = f"by chance alone, {len(changes) / 126:.1f} of these {len(changes)} would count as better or worse"
    table = Table("workload", "mode", "", "before", "after", "change", "", "mean acceptance length", caption=chance)
    for each in changes:
        lengths = f"{each.length_before:.2f}"
        if round(each.length_before, 2) != round(each.length_after, 2):
            lengths += f" -> {each.length_after:.2f}"
        change = f"{statistics.median(each.after) / statistics.median(each.before) - 1:+.1%}"
        digits = {FIRST_TOKEN: 0, "tokens/s": 1}.get(each.unit, 2)
        values = (spread(values, digits) for values in (each.before, each.after))
        table.add_row(each.workload, each.mode.label, each.unit, *values, change, each.verdict, lengths)
    return table
