"""Compare how fast bundles read a prompt in chunks of different sizes.

Bundles and sizes take turns. Prints a line for each bundle and size: the median tokens per second with the extremes, and the
longest pass, which is how long another client's next token waits (the median of its longest passes).
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from pathlib import Path

import click
import numpy as np

from outrider.backends.open import open_bundle, open_engines
from outrider.experiments.measure.arguments import FOLDER, repeat


@click.command(help=__doc__)
@click.argument("bundles", type=FOLDER, nargs=-1, required=True)
@click.option(
    "--chunk", "chunks", multiple=True, type=int, default=(64,), show_default=True, help="Tokens; repeat for several."
)
@click.option("--length", default=1024, show_default=True, help="Tokens of the prompt.")
@repeat
def command(bundles: tuple[Path, ...], chunks: tuple[int, ...], length: int, repeat: int) -> None:
    sessions = {path: open_engines(path, *open_bundle(path)).session("target", batch=1) for path in bundles}
    ids = np.random.default_rng(0).integers(0, min(each.vocab_rows for each in sessions.values()), (1, length))
    whole, longest = (defaultdict[tuple[Path, int], list[float]](list) for _ in range(2))
    for run in range(-1, repeat):
        for path, session in sessions.items():
            for chunk in chunks:
                passes = list[float]()
                for at in range(0, length, chunk):
                    started = time.perf_counter()
                    session.write(ids[:, at : at + chunk], np.array([at]))
                    passes.append(time.perf_counter() - started)
                if run >= 0:  # the first one warms up
                    whole[path, chunk].append(length / sum(passes))
                    longest[path, chunk].append(max(passes))
    print("| bundle | chunk | tokens/s | longest pass, s |\n|---|---|---|---|")
    for (path, chunk), speeds in whole.items():
        speed = f"{statistics.median(speeds):.0f} ({min(speeds):.0f}-{max(speeds):.0f})"
        print(f"| {path.name} | {chunk} | {speed} | {statistics.median(longest[path, chunk]):.2f} |")
