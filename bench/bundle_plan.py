"""The plan of a bundle: predictions for its drafters, from its measured costs and a rate or recorded texts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from outrider.backends.open import open_bundle
from outrider.bench.links import Link, LinkedCosts
from outrider.bench.planner import Prediction, at_rate, of_traces
from outrider.bench.results import read
from outrider.bench.simulator import compare
from outrider.bundle.manifest import Build, Manifest
from outrider.errors import UsageError
from outrider.runtime import drafters
from outrider.runtime.policy.choice import NONE
from outrider.runtime.policy.round_costs import RoundCosts


@dataclass
class BundlePlan:
    """The predictions for a bundle, and what they are based on."""

    predictions: list[Prediction]
    rates: dict[str, float] = field(default_factory=dict)  # by drafter; empty if recorded texts give the acceptance
    rates_measured: bool = False
    timed: tuple[int, int] = (0, 0)  # costs that were timed, and that were fitted to them
    # The report's speed-up, by workload, drafter and k.
    measured: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    policies: dict[str, dict[str, float]] = field(default_factory=dict)  # see `simulator.compare`


def plan_bundle(
    bundle: Path, rate: float | None, bench: Path | None, position: int | None, link: Link | None = None
) -> BundlePlan:
    """Predict the speed-up of each drafter on the device.

    Args:
        rate: the acceptance rate; None is as measured for the bundle.
        bench: recorded texts to take the acceptance from instead.
        position: in the cache, to predict for; None is a quarter of the capacity.
        link: between the devices of the target's stages; None if all are on one.

    Raises:
        UsageError: the bundle's costs or acceptance were not measured, nothing drafts, the texts are of other models, or a
            link has no stages.
    """
    manifest, build = open_bundle(bundle)
    if not build.costs:
        raise UsageError(
            "this bundle's costs were not measured", f"run outrider calibrate {bundle} on the machine that will serve it"
        )
    names = drafters.on_device(drafters.available(manifest))  # only their rounds can be predicted from costs
    if not names:
        available = ", ".join(drafters.get(name).label for name in drafters.available(manifest))
        raise UsageError(
            "this bundle has no model or head that drafts, so there is nothing to plan",
            f"outrider bench measures its drafters: {available}",
        )
    costs = RoundCosts(manifest, build) if link is None else LinkedCosts(manifest, build, link)
    if bench is not None:
        return _plan_from_texts(manifest, build, costs, names, bench)
    rates = {name: each for name in names if (each := build.acceptance.get(name) if rate is None else rate) is not None}
    if not rates:
        raise UsageError(
            "this bundle's acceptance was not measured", f"pass --rate or --bench, or run outrider calibrate {bundle}"
        )
    end = min(position or build.capacity // 4, build.capacity)
    predictions = _together([at_rate(costs, name, each, end) for name, each in rates.items()])
    return BundlePlan(predictions, rates, rate is None, build.timed)


def _together(predictions: list[list[Prediction]]) -> list[Prediction]:
    """Return the predictions for several drafters, sorted by workload, with plain decoding once for each workload."""
    together = [each for at, own in enumerate(predictions) for each in own if at == 0 or each.k]
    workloads = list(dict.fromkeys(each.workload for each in together))
    return sorted(together, key=lambda each: workloads.index(each.workload))


def _plan_from_texts(manifest: Manifest, build: Build, costs: RoundCosts, names: list[str], bench: Path) -> BundlePlan:
    results = read(bench)
    models = [Path(model.source).name for model in manifest.models.values()]
    if [results.target, *results.drafts] != models:
        raise UsageError(
            f"{bench} was measured with {' and '.join([results.target, *results.drafts])}; the bundle has"
            f" {' and '.join(models)}",
            "use a report of the same models",
        )
    measured: dict[str, dict[str, dict[str, float]]] = {}
    for summary in results.summaries:
        if summary.mode.drafter in (NONE, *names):
            of_drafter = measured.setdefault(summary.workload, {}).setdefault(summary.mode.drafter, {})
            of_drafter[str(summary.mode.k)] = summary.median_speedup
    return BundlePlan(
        _together([of_traces(costs, name, results.traces) for name in names]),
        timed=build.timed,
        measured=measured,
        policies=compare(results.traces, costs, drafters.available(manifest), early_stopping=build.device == "cpu"),
    )
