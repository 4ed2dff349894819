"""The time of rounds whose target is in stages on several devices."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from outrider.bundle.manifest import Build, Manifest
from outrider.engines.contract import BATCH_DIM, ROWS_DIM, Stage, sized
from outrider.engines.precisions import DTYPES
from outrider.errors import UsageError
from outrider.runtime.policy.round_costs import RoundCosts


class Link(NamedTuple):
    """What connects the device of each stage with the next one's, and the last one's with the first's."""

    latency: float  # milliseconds
    bandwidth: float  # gigabits per second


class LinkedCosts(RoundCosts):
    """Milliseconds of rounds of one sequence, with the hops between the stages of the target.

    A pass crosses each boundary once, with `rows` times its values. Then the accepted tokens go back to the first stage, which
    takes the link's latency.
    """

    def __init__(self, manifest: Manifest, build: Build, link: Link):
        """Take a bundle's costs.

        Raises:
            UsageError: its target is not in stages.
        """
        if not build.stages:
            raise UsageError("this bundle's target is not in stages, so nothing crosses a link", "leave --link out")
        super().__init__(manifest, build)
        self._stages, self._link = build.stages, link

    def verification(self, rows: int, end: int, greedy: bool) -> float:
        """See `Costs.verification`."""
        megabits = sum(_bytes(stage, rows) for stage in self._stages) * 8 / 1e6
        return (
            super().verification(rows, end, greedy) + len(self._stages) * self._link.latency + megabits / self._link.bandwidth
        )


def _bytes(stage: Stage, rows: int) -> int:
    """Return the size of what a stage gives the next one in a pass over `rows` rows."""
    sizes = {BATCH_DIM: 1, ROWS_DIM: rows}
    return sum(prod(sized(each.shape, sizes)) * DTYPES[each.dtype].numpy.itemsize for each in stage.gives)
