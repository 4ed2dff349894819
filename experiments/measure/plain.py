"""Compare plain decoding of bundles, which take turns, and print a Markdown table of their weights and speeds.

Speed is new tokens per second, greedy, without the time to read the prompt: the median, the slowest and the fastest run, and
the median ratio to the first bundle in the same turn.
"""

from __future__ import annotations

import datetime
import platform
import statistics
from pathlib import Path

import click

from outrider import Outrider, SamplingParams
from outrider.engines.threads import processor_name, thread_count
from outrider.experiments.measure import arguments

PROMPT = "The old lighthouse keeper looked out over the sea and"
TOKENS = 64


@click.command(help=__doc__)
@click.argument("bundles", type=arguments.FOLDER, nargs=-1, required=True, metavar="BUNDLE...")
@arguments.repeat
def command(bundles: tuple[Path, ...], repeat: int) -> None:
    loaded = [Outrider.load(bundle) for bundle in bundles]
    params = SamplingParams(max_new_tokens=TOKENS, min_new_tokens=TOKENS)
    turns: list[list[float]] = []
    for _ in range(repeat + 1):  # the first is a warm-up
        turns.append([])
        for outrider in loaded:
            *_, last = outrider.generate(PROMPT, params, k=0)
            turns[-1].append(last.stats.tokens_per_second)
    print("| bundle | backend | target, MB | tokens/s (slowest - fastest) | against the first |\n|---|---|---|---|---|")
    for at, (bundle, outrider) in enumerate(zip(bundles, loaded, strict=True)):
        speeds, ratio = [turn[at] for turn in turns[1:]], statistics.median(turn[at] / turn[0] for turn in turns[1:])
        size = sum(path.stat().st_size for path in (bundle / "target").iterdir()) / 1e6
        speed = f"{statistics.median(speeds):.1f} ({min(speeds):.1f} - {max(speeds):.1f})"
        print(f"| {bundle.name} | {outrider.build.backend} | {size:,.0f} | {speed} | {ratio:.2f} |")
    print(
        f"\n{repeat} turns, {TOKENS} tokens each; {processor_name()} ({platform.machine()}), {thread_count()} threads,"
        f" {datetime.date.today()}"
    )
