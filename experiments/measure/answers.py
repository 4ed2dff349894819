"""Time whole answers, from the request to the last token, and print a Markdown table by workload.

For each prompt, plain decoding, k = auto, and k = auto with a memory of the workload's earlier requests take turns. Each is a
scheduler of its own on a bundle of its own, as in a server with one client, and keeps prefixes of prompts that it has read: the
bundle is in memory three times. Ratios are to plain decoding of the same prompt in the same turn: geometric means over the
prompts, the median of the turns, and their minimum and maximum. All answers must be equal.
"""

from __future__ import annotations

import datetime
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import click

from outrider import Memory, Outrider, SamplingParams
from outrider.bench.measure import machine
from outrider.bench.report import spread
from outrider.errors import OutriderError
from outrider.experiments.measure import arguments
from outrider.runtime.scheduler import Scheduler

WAYS: dict[str, int | str] = {"plain": 0, "k = auto": "auto", "with memory": "auto"}  # and their k


class Timing(NamedTuple):
    """The seconds of one answer, and its tokens."""

    first: float
    whole: float
    tokens: list[int]


def timed(scheduler: Scheduler, prompt: list[int], params: SamplingParams) -> Timing:
    """Answer a prompt."""
    began, first, tokens = time.perf_counter(), 0.0, list[int]()
    scheduler.submit(prompt, params)
    while scheduler.busy:
        for _, result in scheduler.step():
            if isinstance(result, OutriderError):
                raise result
            first = first or time.perf_counter() - began
            tokens += result.token_ids
    return Timing(first, time.perf_counter() - began, tokens)


@click.command(help=__doc__)
@arguments.bundle
@click.argument("prompts", type=arguments.FILE)
@arguments.repeat
@click.option("--each", type=click.IntRange(1), help="Number of prompts of each workload.  [default: all]")
@click.option("--skip", type=click.IntRange(0), default=0, show_default=True, help="Leave out the ratios of the first prompts.")
@click.option("--max-new-tokens", type=int, default=64, show_default=True)
@click.option("--chat", is_flag=True, help="Apply the bundle's chat template to the prompts.")
def command(bundle: Path, prompts: Path, repeat: int, each: int | None, skip: int, max_new_tokens: int, chat: bool) -> None:
    lines = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    memories = {name: Memory() if name == "with memory" else None for name in WAYS}
    loaded = {name: Outrider.load(bundle, slots=None, memory=memory) for name, memory in memories.items()}
    params, outrider = SamplingParams(max_new_tokens=max_new_tokens), loaded["plain"]
    for name, k in WAYS.items():  # a warm-up
        timed(Scheduler(loaded[name], k=k), outrider.text.encode("Hello", chat=chat), params)
    names = [*WAYS]
    print("| workload | prompts | first token: plain, s | k = auto | with memory | whole: plain, s | k = auto | with memory |")
    print("|---" * 8 + "|")
    for workload, of_workload in itertools.groupby(lines, key=lambda line: line["workload"]):
        asked = [outrider.text.encode(line["prompt"], chat=chat) for line in list(of_workload)[:each]]
        turns: list[list[list[Timing]]] = []  # by turn, prompt and way
        for turn in range(repeat):
            schedulers = {name: Scheduler(loaded[name], k=k) for name, k in WAYS.items()}
            for memory in memories.values():
                if memory is not None:
                    memory.clear()
            turns.append([])
            for at, prompt in enumerate(asked):
                timings: dict[str, Timing] = {}
                for name in (names[(at + turn + step) % len(names)] for step in range(len(names))):
                    timings[name] = timed(schedulers[name], prompt, params)
                turns[-1].append([timings[name] for name in WAYS])
                if any(timing.tokens != timings["plain"].tokens for timing in timings.values()):
                    raise click.ClickException(f"the answers to prompt {at} of {workload} differ")
        cells = [workload, str(len(asked) - skip)]
        for seconds in ("first", "whole"):
            values = [[[getattr(timing, seconds) for timing in prompt] for prompt in turn[skip:]] for turn in turns]
            cells.append(f"{statistics.mean(prompt[0] for turn in values for prompt in turn):.2f}")
            for way in (1, 2):
                faster = seconds == "whole"  # a speed-up; of first tokens, the delay
                ratios = [[(p[0] / p[way]) ** (1 if faster else -1) for p in turn] for turn in values]
                cells.append(spread([*map(statistics.geometric_mean, ratios)]))
        print(f"| {' | '.join(cells)} |")
    where = f"{outrider.build.backend}; {machine(outrider.engines.device)}, {datetime.date.today()}"
    print(f"\n{repeat} turns, up to {max_new_tokens} tokens, {where}")
