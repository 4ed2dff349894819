"""`outrider verify`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.commands.options import device
from outrider.commands.output import console, progress_bar

if TYPE_CHECKING:
    from outrider.audit.report import Audit, ComparedTexts, Sampled


@click.command("verify")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--draws", type=click.IntRange(min=100), help="Number of sampled texts per setting and k.  [default: 500]")
@click.option(
    "--engines",
    "export",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Only compare the outputs of each engine with ONNX Runtime on the CPU. DIR is the export of the same pair.",
)
@click.option(
    "--against",
    metavar="TARGET",
    help="Only compare greedy answers with those of transformers. TARGET is the target's checkpoint, as export takes it.",
)
@device
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output, and nothing else.")
@click.pass_context
def command(
    ctx: click.Context,
    bundle: Path,
    draws: int | None,
    export: Path | None,
    against: str | None,
    device: str | None,
    as_json: bool,
) -> None:
    """Check that a bundle emits what its target alone would. The exit code is 0 if it does, and 1 if not."""
    if export is not None:
        ctx.exit(0 if _compare_engines(bundle, export, device, as_json) else 1)
    if against is not None:
        ctx.exit(0 if _compare_answers(bundle, against, device, as_json) else 1)
    from outrider.audit.audit import DRAWS, audit
    from outrider.runtime.generation import Outrider
    from outrider.runtime.memory.memory import Memory

    with progress_bar() as progress:
        outrider = Outrider.load(bundle, progress, device=device, slots=None, memory=Memory())
        report = audit(outrider, draws=draws or DRAWS, progress=progress)
    if as_json:
        click.echo(json.dumps(report.as_dict()))
    else:
        _print(report)
    ctx.exit(0 if report.passed else 1)


def _compare_engines(bundle: Path, export: Path, device: str | None, as_json: bool) -> bool:
    from outrider.audit.engine_checks import compare_engines
    from outrider.backends.open import open_bundle, open_engines
    from outrider.bundle.integrity import unchanged

    with progress_bar() as progress, unchanged(bundle) as bundle, unchanged(export) as export:
        engines = open_engines(bundle, *open_bundle(bundle, progress), device)
        results = list(compare_engines(engines, export, progress))
    passed = all(each.passed for each in results)
    if as_json:
        click.echo(json.dumps({"passed": passed, "engines": [each.as_dict() for each in results]}))
        return passed
    table = _table("engine", "rows", "difference", "tolerance", "same choices", "")
    for each in results:
        verdict = "pass" if each.passed else "FAIL"
        figures = f"{each.difference:.1e}", f"{each.tolerance:.1e}", f"{each.same_choices:.0%}"
        table.add_row(each.engine, str(each.rows), *figures, verdict)
    console().print(table)
    click.echo("the engines agree with ONNX Runtime" if passed else "the engines do NOT agree with ONNX Runtime")
    return passed


def _compare_answers(bundle: Path, against: str, device: str | None, as_json: bool) -> bool:
    from outrider.audit.checkpoint import check_precision, compare_answers
    from outrider.export.checkpoints.source import Source
    from outrider.export.generate import greedy
    from outrider.runtime.generation import Outrider

    with progress_bar() as progress:
        outrider = Outrider.load(bundle, progress, device=device)
        check_precision(outrider)
        source = Source.parse(against)
        source.download(progress)
        generate = greedy(source, outrider.manifest.generation.eos_token_ids)
        texts = compare_answers(outrider, generate, progress)
    if as_json:
        click.echo(json.dumps({"passed": texts.passed, **asdict(texts)}))
    else:
        _print_texts("answers", texts, "answers compared with transformers'", "pass" if texts.passed else "FAIL")
    return texts.passed


def _print(report: Audit) -> None:
    verdicts = {name: "pass" if passed else "FAIL" for name, passed in report.verdicts().items()}
    screen = console()
    arithmetic = report.arithmetic
    click.echo(
        f"arithmetic {verdicts['arithmetic']}  {arithmetic.checked:,} decisions of the graphs repeated in float64:"
        f" {arithmetic.disagreed} differ ({arithmetic.allowed} allowed)"
    )
    _print_texts("greedy", report.greedy, "texts compared with plain decoding", verdicts["greedy"])
    if report.batched:
        _print_texts("batched", report.batched, "texts of batched requests compared with each alone", verdicts["batched"])
    smallest = min(each.p_value for cell in report.sampled for each in cell.comparisons)
    comparisons = sum(len(cell.comparisons) for cell in report.sampled)
    click.echo(
        f"sampled    {verdicts['sampled']}  {comparisons} comparisons with plain decoding, smallest p-value {smallest:.1e}"
        f" (fails below {report.sampled[0].comparisons[0].significance:.1e})"
    )
    click.echo("           distance: total variation between the two samples; the test fails if it is above the bound")
    click.echo("           detects: a distribution that is wrong by this distance fails with a probability of 99%")
    screen.print(_sampled_table(report))
    emitted = sum(cell.emitted for cell in report.sampled)
    click.echo(
        f"support    {verdicts['support']}  {sum(cell.excluded for cell in report.sampled)} of {emitted:,} sampled tokens"
        " lie outside the truncated distribution"
    )
    click.echo(f"controls   {verdicts['controls']}  the same test must detect each wrong sampler, and pass the right one")
    screen.print(_control_table(report))
    if not report.verdicts()["controls"]:
        click.echo("           a wrong sampler was not detected: raise --draws, unless draft and target are the same model")
    counters = report.counters
    click.echo(
        f"counters   {verdicts['counters']}  {counters.generations} generations: {counters.drafted:,} drafted ="
        f" {counters.accepted:,} accepted + {counters.rejected:,} rejected + {counters.unexamined:,} unexamined;"
        f" {counters.emitted:,} emitted = {counters.accepted:,} accepted + {counters.own:,} of the target's own"
    )
    click.echo("the bundle passes" if report.passed else "the bundle FAILS")


def _print_texts(part: str, texts: ComparedTexts, what: str, verdict: str) -> None:
    click.echo(
        f"{part:<10} {verdict}  {texts.compared} {what}: {len(texts.differences)} differ,"
        f" {len(texts.near_ties)} diverge at {texts.ties} near-ties ({texts.allowed} allowed)"
    )
    for each in (*texts.differences, *texts.near_ties):
        click.echo(f"           {each.mode}, token {each.place}: {each.speculative} instead of {each.plain}; {each.prompt!r}")


FIGURES = ("p-value", "distance", "bound", "detects", "token")


def _sampled_table(report: Audit) -> Any:
    table = _table("sampled", "k", *FIGURES)
    for cell in report.sampled:
        table.add_row(cell.setting, str(cell.k or "all"), *_figures(cell), end_section=cell.k is None)
    return table


def _control_table(report: Audit) -> Any:
    table = _table("control", *FIGURES[:3], "excluded", "")
    for control in report.controls:
        verdict = ("detected" if control.detected else "not detected") + ("" if control.passed else ": WRONG")
        name = control.fault or "none: the reference itself"
        name += f", {control.sampled.k}" if isinstance(control.sampled.k, str) else ""
        table.add_row(name, *_figures(control.sampled)[:3], str(control.sampled.excluded), verdict)
    return table


def _table(*names: str) -> Any:
    from rich.table import Column, Table

    return Table(*(Column(name, no_wrap=True) for name in names))


def _figures(cell: Sampled) -> list[str]:
    """Format the comparison with the smallest p-value."""
    worst = min(cell.comparisons, key=lambda each: each.p_value)
    detects = "-" if worst.detects is None else f"{worst.detects:.2f}"
    return [f"{worst.p_value:.1e}", f"{worst.distance:.2f}", f"{worst.bound:.2f}", detects, worst.place]
