"""Measure the time that Outrider itself takes for a round, with engines that take no time.

The bundle supplies the tokenizer, the shapes and the costs, but its engines do not run. Instead, drafted tokens are accepted in
a fixed pattern, so that all modes give the same text. A round includes everything from the choice of k to the event that a
caller gets.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path

import click
import msgspec
import numpy as np

from outrider.backends.base import GraphEngines
from outrider.backends.open import open_bundle
from outrider.bench.report import spread
from outrider.engines.contract import Stage
from outrider.engines.device import Buffer, Cpu, Engine, Launch, nothing
from outrider.experiments.measure import arguments
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.scheduler import Scheduler
from outrider.runtime.text.text import Text

ACCEPTED = (4, 1, 0, 4, 2, 4, 3, 4)  # drafted tokens accepted in each round; the pattern repeats
TOKEN = 300  # the only token of all answers
TOKENS = 2000  # of an answer
GOALS, ADDITIONAL_GOAL = {"fixed": 60.0, "auto": 100.0}, 20.0  # microseconds per round, and for each additional sequence


class FreeEngine(Engine):
    """Writes fixed results and computes nothing."""

    skips_logits = True

    def __init__(self, name: str):
        self._name = name

    def bind(self, tensors: Mapping[str, Buffer]) -> Launch:
        if self._name.endswith("draft_sampler"):
            tensors["token"].view()[...] = TOKEN
        if not self._name.endswith("verifier"):
            return nothing
        tensors["tokens"].view()[...] = TOKEN
        accepted, counts = tensors["accepted"].view(), tensors["drafted_count"].view()
        runs = 0

        def launch() -> None:
            nonlocal runs
            runs += 1
            np.minimum(counts, ACCEPTED[runs % len(ACCEPTED)], out=accepted)

        return launch


class FreeEngines(GraphEngines):
    """The engines of a bundle, replaced by engines that compute nothing."""

    def step_model(self, role: str, stage: Stage | None = None) -> Engine:
        return FreeEngine(role)

    def sampler(self, name: str) -> Engine:
        return FreeEngine(name)


def measure(outrider: Outrider, batch: int, k: int | str) -> float:
    """Return the microseconds per round of a batch of sequences."""
    scheduler = Scheduler(outrider, k=k)
    params = SamplingParams(max_new_tokens=TOKENS, min_new_tokens=0)
    requests = [scheduler.submit([TOKEN + 1, TOKEN], params) for _ in range(batch)]
    for _ in range(batch):  # read the prompts, one per step
        scheduler.step()
    before = max(request.stats.rounds for request in requests)
    started = time.perf_counter()
    while scheduler.busy:
        scheduler.step()
    took = time.perf_counter() - started
    return 1e6 * took / (max(request.stats.rounds for request in requests) - before)


@click.command(help=__doc__)
@arguments.bundle
@arguments.repeat
def command(bundle: Path, repeat: int) -> None:
    manifest, build = open_bundle(bundle)
    manifest = msgspec.structs.replace(manifest, generation=msgspec.structs.replace(manifest.generation, eos_token_ids=[]))
    capacity = TOKENS + 64
    build = msgspec.structs.replace(build, batch=8, capacity=capacity, windows=[64, capacity], costs={})
    text = Text.load(bundle, manifest)
    outriders = {batch: Outrider(FreeEngines(bundle, manifest, build, Cpu()), text, slots=batch) for batch in (1, 8)}
    fixed = outriders[1].default_k
    cases: dict[str, tuple[int, int | str]] = {
        "plain": (1, 0),
        "fixed": (1, fixed),
        "auto": (1, "auto"),
        "fixed of 8": (8, fixed),
        "auto of 8": (8, "auto"),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeat):
        for name, (batch, k) in cases.items():
            times[name].append(measure(outriders[batch], batch, k))
    for name, each in times.items():
        print(f"{name:32} {spread(each, 1)} µs" + (f"   goal {GOALS[name]:g}" if name in GOALS else ""))
    for name in ("fixed", "auto"):
        additional = (statistics.median(times[f"{name} of 8"]) - statistics.median(times[name])) / 7
        print(f"{f'{name}, each additional sequence':32} {additional:.1f} µs   goal {ADDITIONAL_GOAL:g}")
