"""Measure what it gains that two halves of a batch alternate over stages in other processes.

Three ways take turns: one half of the requests at a time, all requests in one round, and two halves that alternate. Prints the
tokens per second of each after the prompts, and the ratio to the first. With OMP_NUM_THREADS=1, each stage has one thread.
"""

from __future__ import annotations

import time
from pathlib import Path

import click
import msgspec

from outrider.bench.report import spread
from outrider.experiments.measure import arguments
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.scheduler import Scheduler

PROMPT = "Write a story about the sea."


def measure(outrider: Outrider, k: int | str, requests: int, tokens: int) -> float:
    """Return the tokens per second of this many equal requests, after their prompts and first tokens."""
    scheduler, prompt = Scheduler(outrider, k=k), outrider.text.encode(PROMPT, chat=False)
    asked = [scheduler.submit(prompt, SamplingParams(max_new_tokens=tokens)) for _ in range(requests)]
    while any(not each.stats.emitted for each in asked):
        scheduler.step()
    before, started = sum(each.stats.emitted for each in asked), time.perf_counter()
    while scheduler.busy:
        scheduler.step()
    return (sum(each.stats.emitted for each in asked) - before) / (time.perf_counter() - started)


@click.command(help=__doc__)
@arguments.bundle
@arguments.repeat
@click.option("--requests", type=click.IntRange(2), default=2, show_default=True, help="Number of requests; an even one.")
@click.option("--tokens", type=click.IntRange(2), default=64, show_default=True, help="Tokens of each answer.")
@click.option("--k", default="0", show_default=True, help="Drafted tokens, or auto.")
def command(bundle: Path, repeat: int, requests: int, tokens: int, k: str) -> None:
    outrider = Outrider.load(bundle, slots=requests, stage_cores=1)
    generation = msgspec.structs.replace(outrider.manifest.generation, eos_token_ids=[])
    outrider.manifest = msgspec.structs.replace(outrider.manifest, generation=generation)
    halves, size = outrider.decoder.halves, int(k) if k.isdigit() else k
    ways = {"one half at a time": (requests // 2, ()), "all in one round": (requests, ()), "in halves": (requests, halves)}
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-1, repeat):  # the first one warms up
        for name, (count, overlapping) in ways.items():
            outrider.decoder.halves = overlapping
            speed = measure(outrider, size, count, tokens)
            speeds[name] += [speed] * (turn >= 0)
    first, *_ = speeds.values()
    for name, each in speeds.items():
        ratios = [ours / theirs for ours, theirs in zip(each, first, strict=True)]
        print(f"{name:20} {spread(each, 1)} tokens/s, {spread(ratios, 2)} of the first", flush=True)
