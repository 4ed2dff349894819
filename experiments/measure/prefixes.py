"""Measure the time to the first token of requests with the same prefix.

In each repetition, the first request reads a prefix that is in no cache. The second request starts after the first has ended,
and the third while the second is running. Each has different tokens after the prefix, and its own slot.
"""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path

import click
import msgspec

from outrider.backends.open import open_bundle, open_engines
from outrider.bench.report import spread
from outrider.errors import OutriderError
from outrider.experiments.measure import arguments
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.request import Request
from outrider.runtime.scheduler import Scheduler
from outrider.runtime.text.text import Text

SLOTS = 3
PREFIX, USER = 1000, 32  # tokens: of the common prefix, and of each prompt after it
PARAMS = SamplingParams(max_new_tokens=16, min_new_tokens=16)


def first_token(scheduler: Scheduler, prompt: list[int]) -> tuple[Request, float]:
    """Submit a request. Return it, and the seconds to its first token."""
    started = time.perf_counter()
    request = scheduler.submit(prompt, PARAMS)
    while not request.stats.emitted:
        for _, result in scheduler.step():
            if isinstance(result, OutriderError):
                raise result
    return request, time.perf_counter() - started


@click.command(help=__doc__)
@arguments.bundle
@arguments.repeat
def command(bundle: Path, repeat: int) -> None:
    manifest, build = open_bundle(bundle)
    build = msgspec.structs.replace(build, batch=SLOTS)
    text = Text.load(bundle, manifest)
    outrider = Outrider(open_engines(bundle, manifest, build), text, slots=SLOTS)
    scheduler = Scheduler(outrider)
    tokens = random.Random(0)
    seconds: dict[str, list[float]] = {"first": [], "second": [], "third": []}
    for repetition in range(repeat + 1):
        shared = [tokens.randrange(1000, 20000) for _ in range(PREFIX)]
        for name, times in seconds.items():
            request, took = first_token(scheduler, shared + [tokens.randrange(1000, 20000) for _ in range(USER)])
            if repetition:  # the first repetition is the warm-up
                times.append(took)
            while name == "first" and scheduler.busy:
                scheduler.step()
            assert (request.stats.cached_tokens >= PREFIX) == (name != "first")
        while scheduler.busy:
            scheduler.step()
    first = statistics.median(seconds["first"])
    for name, times in seconds.items():
        print(f"{name:8}{spread(times, 3)} s   {statistics.median(times) / first:.3f}")
