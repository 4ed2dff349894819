"""`outrider verify`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.commands.options import device
from outrider.commands.output import console, progress_bar

if TYPE_CHECKING:
    from outrider.audit.report import Audit, Sampled, Texts


@click.command("verify")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--draws", type=click.IntRange(min=100), help="Sampled texts for each setting and k.  [default: 500]")
@click.option(
    "--engines",
    "export",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Instead, compare each engine's outputs with ONNX Runtime's on the CPU; DIR is the export of the same pair.",
)
@device
@click.option("--json", "as_json", is_flag=True, help="Print the whole report as one JSON object.")
@click.pass_context
def command(
    ctx: click.Context, bundle: Path, draws: int | None, export: Path | None, device: str | None, as_json: bool
) -> None:
    """Prove that a bundle emits what its target alone would: exit code 0 if it does, 1 if not."""
    if export is not None:
        ctx.exit(0 if _compare_engines(bundle, export, device, as_json) else 1)
    from outrider.audit.audit import DRAWS, audit
    from outrider.runtime.generation import Outrider

    with progress_bar() as progress:
        found = audit(Outrider.load(bundle, progress, device=device, slots=None), draws=draws or DRAWS, progress=progress)
    if as_json:
        click.echo(json.dumps(found.as_dict()))
    else:
        _print(found)
    ctx.exit(0 if found.passed else 1)


def _compare_engines(bundle: Path, export: Path, device: str | None, as_json: bool) -> bool:
    from outrider.audit.engines import compare_engines
    from outrider.backends.open import open_bundle, open_engines

    with progress_bar() as progress:
        engines = open_engines(bundle, *open_bundle(bundle, progress), device)
        found = list(compare_engines(engines, export, progress))
    passed = all(each.passed for each in found)
    if as_json:
        click.echo(json.dumps({"passed": passed, "engines": [each.as_dict() for each in found]}))
        return passed
    table = _table("engine", "rows", "differs by", "allowed", "same choices", "")
    for each in found:
        verdict = "pass" if each.passed else "FAIL"
        figures = f"{each.difference:.1e}", f"{each.tolerance:.1e}", f"{each.same_choices:.0%}"
        table.add_row(each.engine, str(each.rows), *figures, verdict)
    console().print(table)
    click.echo("the engines compute what ONNX Runtime does" if passed else "the engines do NOT compute what ONNX Runtime does")
    return passed


def _print(found: Audit) -> None:
    verdicts = {name: "pass" if passed else "FAIL" for name, passed in found.verdicts().items()}
    screen = console()
    arithmetic = found.arithmetic
    click.echo(
        f"arithmetic {verdicts['arithmetic']}  {arithmetic.checked:,} decisions of the graphs taken again in float64:"
        f" {arithmetic.disagreed} differ ({arithmetic.allowed} allowed)"
    )
    _print_texts("greedy", found.greedy, "compared with plain decoding", verdicts)
    if found.batched:
        _print_texts("batched", found.batched, "of requests that share passes compared with the same requests alone", verdicts)
    least = min(each.p_value for cell in found.sampled for each in cell.comparisons)
    comparisons = sum(len(cell.comparisons) for cell in found.sampled)
    click.echo(
        f"sampled    {verdicts['sampled']}  {comparisons} comparisons with plain decoding, smallest p-value {least:.1e}"
        f" (fails below {found.sampled[0].comparisons[0].significance:.1e})"
    )
    click.echo("           distance: total variation between the two samples; above the bound it is no chance, and fails;")
    click.echo("           a bundle whose distribution is off by as much as 'finds' says fails with a probability of 99%")
    screen.print(_sampled_table(found))
    emitted = sum(cell.emitted for cell in found.sampled)
    click.echo(
        f"support    {verdicts['support']}  {sum(cell.excluded for cell in found.sampled)} of {emitted:,} sampled tokens"
        " excluded by truncation"
    )
    click.echo(f"controls   {verdicts['controls']}  wrong samplers must be found by the same test, the right one must not")
    screen.print(_control_table(found))
    if not found.verdicts()["controls"]:
        click.echo("           a wrong sampler that is not found: raise --draws, unless the draft is its target")
    counters = found.counters
    click.echo(
        f"counters   {verdicts['counters']}  {counters.generations} generations: {counters.drafted:,} drafted ="
        f" {counters.accepted:,} accepted + {counters.rejected:,} rejected + {counters.unexamined:,} unexamined;"
        f" {counters.emitted:,} emitted = {counters.accepted:,} accepted + {counters.own:,} the target's own"
    )
    click.echo("the bundle passes" if found.passed else "the bundle FAILS")


def _print_texts(part: str, found: Texts, what: str, verdicts: dict[str, str]) -> None:
    click.echo(
        f"{part:<10} {verdicts[part]}  {found.compared} texts {what}: {len(found.differences)} differ,"
        f" {len(found.near_ties)} diverge at {found.ties} near-ties ({found.allowed} allowed)"
    )
    for each in (*found.differences, *found.near_ties):
        click.echo(
            f"           {each.mode}, token {each.place}: plain {each.plain}, speculative {each.speculative}; {each.prompt!r}"
        )


FIGURES = ("p-value", "distance", "bound", "finds", "token")


def _sampled_table(found: Audit) -> Any:
    table = _table("sampled", "k", *FIGURES)
    for cell in found.sampled:
        table.add_row(cell.setting, str(cell.k or "all"), *_figures(cell), end_section=cell.k is None)
    return table


def _control_table(found: Audit) -> Any:
    table = _table("control", *FIGURES[:3], "excluded", "")
    for control in found.controls:
        verdict = ("found" if control.found else "not found") + ("" if control.passed else ": WRONG")
        name = control.fault or "none: the reference as it is"
        name += f", {control.sampled.k}" if isinstance(control.sampled.k, str) else ""
        table.add_row(name, *_figures(control.sampled)[:3], str(control.sampled.excluded), verdict)
    return table


def _table(*names: str) -> Any:
    from rich.table import Column, Table

    return Table(*(Column(name, no_wrap=True) for name in names))


def _figures(cell: Sampled) -> list[str]:
    """Of the place where the two samples differ most for their size."""
    worst = min(cell.comparisons, key=lambda each: each.p_value)
    finds = "-" if worst.finds is None else f"{worst.finds:.2f}"
    return [f"{worst.p_value:.1e}", f"{worst.distance:.2f}", f"{worst.bound:.2f}", finds, worst.place]
