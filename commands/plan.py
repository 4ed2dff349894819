"""`outrider plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.commands.options import GroupedCommand, GroupedOption
from outrider.commands.output import console, costs_note, print_json, printable
from outrider.errors import UsageError

if TYPE_CHECKING:
    from outrider.bench.bundle_plan import BundlePlan
    from outrider.bench.planner import Prediction

NUMBERS, BUNDLE = "From numbers", "From a bundle"
NUMBER_OPTIONS = ("k", "mean_accepted", "cost_ratio", "pass_cost", "hop_cost", "tokens")
MOST_OF_LINK = 1e9  # milliseconds, and gigabits per second; sums of larger numbers may overflow
BUNDLE_OPTIONS = ("bench", "position", "link")


@click.command("plan", cls=GroupedCommand)
@click.argument("bundle", required=False, type=click.Path(path_type=Path))
@click.option("--k", cls=GroupedOption, group=NUMBERS, type=click.IntRange(1, 1000), help="Draft tokens per round.")
@click.option(
    "--mean-accepted",
    cls=GroupedOption,
    group=NUMBERS,
    type=click.FloatRange(min=1),
    help="Average number of tokens per target pass (mean acceptance length).",
)
@click.option(
    "--cost-ratio",
    cls=GroupedOption,
    group=NUMBERS,
    type=click.FloatRange(min=0, min_open=True),
    help="Time of a target pass over one row, divided by the time of a draft step.",
)
@click.option(
    "--pass-cost",
    cls=GroupedOption,
    group=NUMBERS,
    type=click.FloatRange(min=0, min_open=True),
    help="Time of a target pass over k + 1 rows, divided by that of a pass over one row.  [default: 1]",
)
@click.option(
    "--hop-cost",
    cls=GroupedOption,
    group=NUMBERS,
    type=click.FloatRange(min=0),
    help="With stages on several devices: time of a pass between them, divided by that of a target pass over one row."
    "  [default: 0]",
)
@click.option(
    "--tokens", cls=GroupedOption, group=NUMBERS, type=click.IntRange(1, 10**9), help="Length of the text.  [default: 100]"
)
@click.option(
    "--rate",
    type=click.FloatRange(0, 1),
    help="Probability that a draft token is accepted if the ones before it were.  [default: as measured for the bundle]",
)
@click.option(
    "--bench",
    cls=GroupedOption,
    group=BUNDLE,
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="BENCH.json",
    help="Texts recorded by outrider bench, with any bundle of the same models.",
)
@click.option(
    "--position",
    cls=GroupedOption,
    group=BUNDLE,
    type=click.IntRange(min=1),
    help="With --rate: the position in the cache to predict for.  [default: a quarter of the capacity]",
)
@click.option(
    "--link",
    cls=GroupedOption,
    group=BUNDLE,
    type=(click.FloatRange(min=0), click.FloatRange(min=0, min_open=True)),
    metavar="MS GBIT",
    help="With stages on several devices: latency in milliseconds and gigabits per second between them.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output, and nothing else.")
def command(bundle: Path | None, rate: float | None, as_json: bool, **options: Any) -> None:
    """Predict the speed-up of speculation, from numbers, or from a bundle's measured costs and a workload's acceptance."""
    _check_options(bundle, rate, options)
    if bundle is None:
        _plan_from_numbers(rate, as_json, **{name: options[name] for name in NUMBER_OPTIONS})
        return
    from outrider.bench.bundle_plan import plan_bundle
    from outrider.bench.links import Link

    link = None if options["link"] is None else Link(*options["link"])
    plan = plan_bundle(bundle, rate, options["bench"], options["position"], link)
    if as_json:
        _print_json(plan)
    else:
        _print(plan)


def _check_options(bundle: Path | None, rate: float | None, options: dict[str, Any]) -> None:
    unused = BUNDLE_OPTIONS if bundle is None else NUMBER_OPTIONS
    for name in unused:
        if options[name] is not None:
            flag = f"--{name.replace('_', '-')}"
            required = "needs a bundle" if bundle is None else "cannot be used with a bundle"
            raise UsageError(f"{flag} {required}", f"see outrider plan --help; leave {flag} out")
    if rate is not None and not 0 <= rate <= 1:  # NaN, which passes a range check
        raise UsageError(f"--rate is {rate}", "use a number from 0 to 1")
    latency, bandwidth = options["link"] or (0.0, 1.0)
    if not (latency <= MOST_OF_LINK and 1 / MOST_OF_LINK <= bandwidth <= MOST_OF_LINK):
        raise UsageError("--link is not finite, or no number of a real link", "for example: --link 0.2 10")
    if rate is not None and options["bench"] is not None:
        raise UsageError("--rate and --bench cannot be combined", "leave one of them out")
    if options["position"] is not None and options["bench"] is not None:
        raise UsageError("--position and --bench cannot be combined", "leave out --position: recorded texts have their own")


def _plan_from_numbers(
    rate: float | None,
    as_json: bool,
    *,
    k: int | None,
    mean_accepted: float | None,
    cost_ratio: float | None,
    pass_cost: float | None,
    hop_cost: float | None,
    tokens: int | None,
) -> None:
    if k is None or cost_ratio is None or (mean_accepted is None) == (rate is None):
        raise UsageError(
            "without a bundle, --k, --cost-ratio and either --mean-accepted or --rate are required",
            "for example: outrider plan --k 4 --mean-accepted 3 --cost-ratio 6 --tokens 12",
        )
    import msgspec

    from outrider.bench.planner import account
    from outrider.runtime.policy.costs import expected_tokens

    if mean_accepted is None:
        assert rate is not None
        mean_accepted = expected_tokens(rate, k)
    tokens = 100 if tokens is None else tokens
    result = account(k, mean_accepted, cost_ratio, tokens, 1.0 if pass_cost is None else pass_cost, hop_cost or 0.0)
    if as_json:
        print_json(msgspec.json.encode(result))
        return
    click.echo(f"{result.target_passes} target passes, {result.draft_steps} draft steps")
    click.echo(f"{result.target_steps:.1f} target-step equivalents for {tokens} tokens, {mean_accepted:.2f} per pass")
    click.echo(f"{result.speedup:.1f} times plain decoding")


def _print_json(plan: BundlePlan) -> None:
    import msgspec

    from outrider.bench.planner import best

    result = {
        "rates": plan.rates,
        "predictions": plan.predictions,
        "measured": plan.measured,
        "best": {workload: {"drafter": each.drafter, "k": each.k} for workload, each in best(plan.predictions).items()},
        "policies": plan.policies,
    }
    print_json(msgspec.json.encode(result))


def _print(plan: BundlePlan) -> None:
    from rich.table import Table

    from outrider.bench.planner import best
    from outrider.bench.simulator import REGRET_HEADS, regrets
    from outrider.runtime import drafters

    if plan.rates:
        source = ", as measured for the bundle" if plan.rates_measured else ""
        for name, rate in plan.rates.items():
            click.echo(f"if {rate:.0%} of the tokens of the {drafters.get(name).label} are accepted{source};")
        click.echo("excludes the time in which the draft reads the prompt; predictions with --bench include it")
    click.echo(f"costs: {costs_note(*plan.timed)}")
    fastest = best(plan.predictions)
    console().print(_table(plan.predictions, fastest, plan.measured))
    for line in _advice(fastest):
        click.echo(printable(line))
    if plan.policies:
        table = Table(*REGRET_HEADS, title="k = auto, replayed on the same texts with these costs", title_justify="left")
        for cells in regrets(plan.policies):
            table.add_row(*cells)
        console().print(table)


def _table(
    predictions: list[Prediction], fastest: dict[str, Prediction], measured: dict[str, dict[str, dict[str, float]]]
) -> Any:
    from rich.table import Table

    from outrider.bench.planner import BETTER, CHEAPER

    heads = ("workload", "drafter", "k", "mean acceptance length", "tokens/s", "speed-up", *(("measured",) if measured else ()))
    table = Table(*heads, "break-even rate", f"draft at {CHEAPER:.0%} of its cost", f"{BETTER:.0%} fewer rejections")
    for each in predictions:
        speedup = measured.get(each.workload, {}).get(each.drafter, {}).get(str(each.k))
        table.add_row(
            each.workload or "-",
            each.drafter,
            f"{each.k}",
            f"{each.mean_acceptance_length:.2f}",
            f"{each.tokens_per_second:.1f}",
            f"{each.speedup:.2f}",
            *(("-" if speedup is None else f"{speedup:.2f}",) if measured else ()),
            "-" if each.k == 0 else "none" if each.break_even is None else f"{each.break_even:.2f}",
            f"{each.cheaper_draft:.2f}",
            f"{each.better_draft:.2f}",
            style="bold" if each is fastest[each.workload] else None,
        )
    return table


def _advice(fastest: dict[str, Prediction]) -> list[str]:
    from outrider.runtime import drafters

    lines = []
    for workload, each in fastest.items():
        drafter = drafters.get(each.drafter).label if each.k else ""
        advice = f"{drafter}, k = {each.k}, {each.speedup:.2f} times plain" if each.k else "plain decoding is fastest"
        lines.append(f"{workload}: {advice}" if workload else advice)
    return lines
