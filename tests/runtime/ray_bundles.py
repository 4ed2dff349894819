"""Bundles whose stages run in a Ray cluster, and what tests of them have in common; conftest.py has the fixtures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from outrider.backends.base import Engines
from outrider.backends.open import open_bundle, open_engines
from outrider.backends.remote_stages import RayStages
from outrider.backends.stage_chain import Chain, Sent
from outrider.backends.stage_host import Crossing, PassedOn

STAGES = {"pair": "3", "hybrid": "3", "openvino": "3"}  # others have 2
EXPORTS = {
    "pair": "shipped",
    "hybrid": "fp32 hybrid",
    "openvino": "shipped",
    "head": "fp32 trained head",
    "block": "fp32 random block",
    "parallel head": "fp32 random parallel-head",
    "parallel draft": "fp32 trained parallel",
}
MACHINE, NODES = "one machine", "a node each"


class Bundles(NamedTuple):
    """A target in one piece and in stages."""

    whole: Path
    staged: Path


over_nodes = pytest.mark.parametrize("cluster", [NODES], indirect=True)


def over(*cases: tuple[str, str]) -> pytest.MarkDecorator:
    """Run a test in these clusters, over these bundles."""
    return pytest.mark.parametrize(("cluster", "name"), cases, indirect=["cluster"], scope="module")


def engines(bundle: Path, passing: float = 60) -> Engines:
    opened = open_engines(bundle, *open_bundle(bundle))
    opened.elsewhere = RayStages(passing=passing)
    return opened


def watched(monkeypatch: pytest.MonkeyPatch, then: Callable[[int], object] = lambda _: None) -> list[int]:
    """Return how many passes are under way, whenever one is sent or received. Call a function before one is waited for."""
    send, receive, counts = Chain.send, Chain.receive, [0]

    def sending(self: Chain, message: Crossing) -> Sent:
        sent = send(self, message)
        counts.append(counts[-1] + 1)
        return sent

    def receiving(self: Chain, sent: Sent) -> PassedOn:
        then(counts[-1])
        given = receive(self, sent)
        counts.append(counts[-1] - 1)
        return given

    monkeypatch.setattr(Chain, "send", sending)
    monkeypatch.setattr(Chain, "receive", receiving)
    return counts
