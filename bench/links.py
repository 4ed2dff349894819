"""The time of rounds whose target is in stages on several devices."""

from __future__ import annotations

from typing import NamedTuple

from outrider.bundle.manifest import Build, Manifest
from outrider.engines.sizes import layout_bytes, pass_layout
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
            UsageError: its target is not in stages, or their hops are in its costs.
        """
        if not build.stages:
            raise UsageError("this bundle's target is not in stages, so nothing crosses a link", "leave --link out")
        if any(stage.device is not None for stage in build.stages):
            raise UsageError("the costs of this bundle were measured with the copies between its devices", "leave --link out")
        super().__init__(manifest, build)
        self._stages, self._link = build.stages, link

    def verification(self, rows: int, end: int, greedy: bool) -> float:
        """See `Costs.verification`."""
        passed = pass_layout((tensor for stage in self._stages for tensor in stage.gives), 1, rows)
        megabits = layout_bytes(passed.values()) * 8 / 1e6
        return (
            super().verification(rows, end, greedy) + len(self._stages) * self._link.latency + megabits / self._link.bandwidth
        )
