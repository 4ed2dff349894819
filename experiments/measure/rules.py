"""Compare both acceptance rules with plain decoding on sampled text, and print a Markdown table of acceptance and speed.

All variants take turns on each prompt, in `ROUNDS` rounds with different seeds. Speed is new tokens per second, without the
time to read the prompt. The table has the median, the slowest and the fastest round, and the median ratio to plain decoding in
the same round.
"""

from __future__ import annotations

import datetime
import json
import platform
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import click

from outrider import Outrider, SamplingParams
from outrider.engines.threads import thread_count
from outrider.experiments.measure import arguments
from outrider.runtime.params import RULES
from outrider.runtime.stats import Stats

PLAIN = ("plain", 0)
TEMPERATURE, TOP_P = 0.7, 0.9
TOKENS = 64  # of an answer
ROUNDS = 5


@click.command(help=__doc__)
@arguments.bundle
@click.argument("file", metavar="PROMPTS.jsonl", type=arguments.FILE)
def command(bundle: Path, file: Path) -> None:
    outrider = Outrider.load(bundle)
    prompts = [json.loads(line)["prompt"] for line in file.read_text(encoding="utf-8").splitlines()]
    variants = [PLAIN, *((rule, k) for rule in RULES for k in outrider.build.k)]
    totals = {variant: Stats() for variant in variants}
    speeds: dict[tuple[str, int], list[float]] = defaultdict(list)
    for number in range(ROUNDS):
        stats = {variant: Stats() for variant in variants}
        for at, prompt in enumerate(prompts):
            for rule, k in variants:
                params = SamplingParams(
                    temperature=TEMPERATURE,
                    top_p=TOP_P,
                    seed=number * len(prompts) + at,
                    rule=rule if k else RULES[0],
                    max_new_tokens=TOKENS,
                )
                *_, last = outrider.generate(prompt, params, k=k)
                stats[rule, k].add(last.stats)
        for variant in variants:
            totals[variant].add(stats[variant])
            speeds[variant].append(stats[variant].tokens_per_second)
        print(f"round {number + 1} of {ROUNDS}", file=sys.stderr, flush=True)
    print("| rule | k | mean acceptance length | acceptance rate | tokens/s (slowest - fastest) | against plain |")
    print("|---|---|---|---|---|---|")
    for variant in variants:
        total, own = totals[variant], speeds[variant]
        ratio = statistics.median(a / b for a, b in zip(own, speeds[PLAIN], strict=True))
        accepted = f"{total.mean_acceptance_length:.2f} | {total.acceptance_rate:.2f}" if variant[1] else "- | -"
        speed = f"{statistics.median(own):.0f} ({min(own):.0f} - {max(own):.0f})"
        print(f"| {variant[0]} | {variant[1]} | {accepted} | {speed} | {ratio:.2f} |")
    print(
        f"\n{len(prompts)} prompts, {ROUNDS} rounds, temperature {TEMPERATURE}, top_p {TOP_P}, up to"
        f" {TOKENS} tokens each; {platform.machine()}, {thread_count()} threads, {datetime.date.today()}"
    )
