"""Compare the time of the target's passes in two bundles.

Passes alternate between the bundles. Processes alternate the order of loading, because the bundle that is loaded first is a few
percent slower. For each number of rows, prints both medians in milliseconds and the median ratio A / B of each process, then
the geometric mean of the ratios. A pass of as many rows as a prompt's chunk has gives no logits, as in a prompt.

For example, compare a bundle with a draft head and one without: the ratio shows the cost of the features that the target writes
for the head. That cost is too small for `outrider calibrate`, which measures one bundle after the other.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import click
import numpy as np

from outrider.backends.open import open_bundle, open_engines
from outrider.experiments.measure.arguments import FOLDER

POSITION, WARM_UP = 200, 5
RUNS = 150  # rows per bundle and process; at least FEWEST passes
FEWEST = 8


def measure(bundles: tuple[Path, ...], rows: tuple[int, ...]) -> list[tuple[float, float, float]]:
    """Return the median of each bundle, and the median ratio of the first to the second, for each number of rows."""
    sessions = [open_engines(path, *open_bundle(path)).session("target", batch=1) for path in bundles]
    found, position = [], np.array([POSITION])
    for count in rows:
        tokens, runs = np.ones((1, count), dtype=np.int64), max(FEWEST, RUNS // count)
        times = np.empty((runs, 2))
        for run in range(-WARM_UP, runs):
            for at in (0, 1) if run % 2 else (1, 0):
                session = sessions[at]
                session.assume(position)
                started = time.perf_counter()
                session.write(tokens, position, logits=count < session.max_rows)
                if run >= 0:
                    times[run, at] = 1000 * (time.perf_counter() - started)
        found.append((*np.median(times, 0).tolist(), float(np.median(times[:, 0] / times[:, 1]))))
    return found


@click.command(help=__doc__)
@click.argument("bundles", type=FOLDER, nargs=2, metavar="A B")
@click.option("--rows", multiple=True, type=int, default=(1,), show_default=True, help="Rows of a pass; repeat for several.")
@click.option("--processes", type=click.IntRange(1), default=8, show_default=True, help="Number of processes.")
def command(bundles: tuple[Path, Path], rows: tuple[int, ...], processes: int) -> None:
    ratios = defaultdict[int, list[float]](list)
    for number in range(processes):
        order = bundles[:: -1 if number % 2 else 1]
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            found = pool.submit(measure, order, rows).result()
        for count, (a, b, ratio) in zip(rows, found, strict=True):
            if number % 2:
                a, b, ratio = b, a, 1 / ratio
            ratios[count].append(ratio)
            print(f"{count} rows: {a:.2f} ms, {b:.2f} ms, ratio {ratio:.4f}", flush=True)
    for count, each in ratios.items():
        print(f"{count} rows: ratio {statistics.geometric_mean(each):.4f} ({min(each):.4f}-{max(each):.4f})")
