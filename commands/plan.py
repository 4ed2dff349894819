"""`outrider plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.commands.options import Grouped, In
from outrider.commands.output import console
from outrider.errors import UsageError

if TYPE_CHECKING:
    from outrider.bench.planner import Prediction, Sum

NUMBERS, BUNDLE = "From numbers", "From a bundle"


@click.command("plan", cls=Grouped)
@click.argument("bundle", required=False, type=click.Path(path_type=Path))
@click.option("--k", cls=In, group=NUMBERS, type=click.IntRange(1, 1000), help="Draft tokens a round.")
@click.option(
    "--mean-accepted",
    cls=In,
    group=NUMBERS,
    type=click.FloatRange(min=1),
    help="Tokens that a pass of the target yields on average.",
)
@click.option(
    "--cost-ratio",
    cls=In,
    group=NUMBERS,
    type=click.FloatRange(min=0, min_open=True),
    help="Draft steps that take as long as one pass of the target over one row.",
)
@click.option(
    "--pass-cost",
    cls=In,
    group=NUMBERS,
    type=click.FloatRange(min=0, min_open=True),
    help="Of a pass over k + 1 rows, in passes over one.  [default: 1]",
)
@click.option("--tokens", cls=In, group=NUMBERS, type=click.IntRange(1, 10**9), help="Of the text.  [default: 100]")
@click.option(
    "--rate",
    type=click.FloatRange(0, 1),
    help="The probability that a drafted token is accepted if those before it were.  [default: as measured with the bundle]",
)
@click.option(
    "--bench",
    cls=In,
    group=BUNDLE,
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="BENCH.json",
    help="Texts that outrider bench recorded, of any bundle with the same models.",
)
@click.option(
    "--position",
    cls=In,
    group=BUNDLE,
    type=click.IntRange(min=1),
    help="With --rate: where in the cache.  [default: a quarter in]",
)
@click.option(
    "--plot", cls=In, group=BUNDLE, type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.svg", help="Draw it."
)
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON on standard output, and nothing else there.")
def command(
    bundle: Path | None,
    k: int | None,
    mean_accepted: float | None,
    cost_ratio: float | None,
    pass_cost: float | None,
    tokens: int | None,
    rate: float | None,
    bench: Path | None,
    position: int | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Predict what speculation brings: from numbers, or from a bundle's measured costs and a workload's acceptance."""
    import msgspec

    of_numbers = {
        "--k": k,
        "--mean-accepted": mean_accepted,
        "--cost-ratio": cost_ratio,
        "--pass-cost": pass_cost,
        "--tokens": tokens,
    }
    of_bundles = {"--bench": bench, "--position": position, "--plot": plot}
    for name, value in (of_bundles if bundle is None else of_numbers).items():
        if value is not None:
            of = "a bundle" if bundle is None else "numbers alone"
            raise UsageError(f"{name} goes with {of}", f"see outrider plan --help; leave {name} out")
    if rate is not None and not 0 <= rate <= 1:  # NaN, which no range refuses
        raise UsageError(f"--rate is {rate}", "give a number from 0 to 1")
    if plot is not None and plot.suffix != ".svg":
        raise UsageError(f"--plot {plot}: pictures are SVG", "name it something.svg")
    if bundle is None:
        if k is None or cost_ratio is None or (mean_accepted is None) == (rate is None):
            raise UsageError(
                "without a bundle, --k, --cost-ratio and one of --mean-accepted and --rate are needed",
                "for example: outrider plan --k 4 --mean-accepted 3 --cost-ratio 6 --tokens 12",
            )
        from outrider.bench.planner import account
        from outrider.runtime.costs import expected_tokens

        if mean_accepted is None:
            assert rate is not None
            mean_accepted = expected_tokens(rate, k)
        tokens = 100 if tokens is None else tokens
        found = account(k, mean_accepted, cost_ratio, tokens, 1.0 if pass_cost is None else pass_cost)
        if as_json:
            click.echo(msgspec.json.encode(found).decode())
        else:
            _say(found, mean_accepted, tokens)
        return
    if rate is not None and bench is not None:
        raise UsageError("--rate and --bench say two things", "leave one of them out")
    from outrider.backends.open import open_bundle
    from outrider.bench.planner import at_rate, best, of_traces, plannable
    from outrider.bench.results import read as read_results
    from outrider.bench.simulator import REGRET_HEADS, compare, regrets
    from outrider.runtime import drafters
    from outrider.runtime.costs import Costs
    from outrider.runtime.drafters.base import NONE

    manifest, build = open_bundle(bundle)
    if not build.costs:
        raise UsageError("this bundle's costs were not measured", f"outrider calibrate {bundle}, where it is to run")
    drafter = plannable(drafters.available(manifest))
    if drafter is None:
        raise UsageError("this bundle has no draft model, so there is nothing to plan", "outrider bench measures its n-grams")
    costs, policies = Costs(manifest, build), dict[str, dict[str, float]]()
    measured: dict[str, dict[str, float]] = {}  # workload -> k -> the speed-up that the report has
    if bench is not None:
        if position is not None:
            raise UsageError("--position goes with --rate", "leave it out: the texts say where they were")
        results = read_results(bench)
        models = [Path(model.source).name for model in manifest.models.values()]
        if [results.target, results.draft] != models:
            raise UsageError(
                f"{bench} is of {results.target} and {results.draft}; the bundle has {' and '.join(models)}",
                "measure a bundle of the same models",
            )
        predictions = of_traces(costs, drafter, results.traces)
        for each in results.summaries:
            if each.way.drafter in (NONE, drafter):
                measured.setdefault(each.workload, {})[str(each.way.k)] = each.median_speedup
        policies = compare(results.traces, costs, early_stopping=build.device == "cpu")
    else:
        given = rate is not None
        rate = build.acceptance.get(drafter) if rate is None else rate
        if rate is None:
            raise UsageError(
                "this bundle's acceptance was not measured", f"give --rate or --bench, or: outrider calibrate {bundle}"
            )
        predictions = at_rate(costs, drafter, rate, min(position or build.capacity // 4, build.capacity))
    if plot is not None:
        from outrider.bench.report import write_plan

        write_plan(plot, predictions)
    fastest = best(predictions)
    if as_json:
        best_k = {workload: each.k for workload, each in fastest.items()}
        said = {"rate": rate, "predictions": predictions, "measured": measured, "best_k": best_k, "policies": policies}
        click.echo(msgspec.json.encode(said).decode())
        return
    if bench is None:
        click.echo(f"where {rate:.0%} of the draft's tokens are accepted{'' if given else ', as measured with the bundle'};")
        click.echo("without what the draft takes to read the prompt, which recorded texts show (--bench)")
    console().print(_table(predictions, fastest, measured))
    for line in _advice(fastest):
        click.echo(line)
    if policies:
        from rich.table import Table

        table = Table(*REGRET_HEADS, title="k chosen live, on the same texts by these costs", title_justify="left")
        for cells in regrets(policies):
            table.add_row(*cells)
        console().print(table)
    if plot is not None:
        click.echo(f"wrote {plot}")


def _say(found: Sum, tokens_per_pass: float, tokens: int) -> None:
    click.echo(f"{found.target_passes} target passes, {found.draft_steps} draft steps")
    click.echo(f"{found.target_steps:.1f} target-step equivalents for {tokens} tokens, {tokens_per_pass:.2f} a pass")
    click.echo(f"{found.speedup:.1f} times plain decoding")


def _table(predictions: list[Prediction], fastest: dict[str, Prediction], measured: dict[str, dict[str, float]]) -> Any:
    from rich.table import Table

    from outrider.bench.planner import BETTER, CHEAPER

    heads = ("workload", "k", "mean acceptance length", "tokens/s", "speed-up", *(("measured",) if measured else ()))
    table = Table(*heads, "break-even rate", f"draft at {CHEAPER:.0%} of its cost", f"{BETTER:.0%} fewer rejections")
    for each in predictions:
        known = measured.get(each.workload, {}).get(str(each.k))
        table.add_row(
            each.workload or "-",
            f"{each.k}",
            f"{each.mean_acceptance_length:.2f}",
            f"{each.tokens_per_second:.1f}",
            f"{each.speedup:.2f}",
            *(("-" if known is None else f"{known:.2f}",) if measured else ()),
            "-" if each.k == 0 else "none" if each.break_even is None else f"{each.break_even:.2f}",
            f"{each.cheaper_draft:.2f}",
            f"{each.better_draft:.2f}",
            style="bold" if each is fastest[each.workload] else None,
        )
    return table


def _advice(fastest: dict[str, Prediction]) -> list[str]:
    lines = []
    for workload, each in fastest.items():
        of = f"{workload}: " if workload else ""
        lines.append(f"{of}k = {each.k}, {each.speedup:.2f} times plain" if each.k else f"{of}plain decoding is best")
    return lines
