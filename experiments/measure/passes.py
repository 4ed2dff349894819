"""Compare the time of the target's pass over one row in two bundles.

Passes alternate between the bundles. Processes alternate the order of loading, because the bundle that is loaded first is a few
percent slower. Prints both medians in milliseconds and the median ratio A / B of each process, then the geometric mean of the
ratios.

For example, compare a bundle with a draft head and one without: the ratio shows the cost of the features that the target writes
for the head. That cost is too small for `outrider calibrate`, which measures one bundle after the other.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import click
import numpy as np

from outrider.backends.open import open_bundle, open_engines
from outrider.experiments.measure.arguments import FOLDER

POSITION, WARM_UP = 200, 10
RUNS, PROCESSES = 150, 8  # passes per bundle and process


def measure(bundles: tuple[Path, ...]) -> list[float]:
    """Return the median of each bundle, and the median ratio of the first to the second."""
    sessions = [open_engines(path, *open_bundle(path)).session("target", batch=1) for path in bundles]
    times = np.empty((RUNS, 2))
    token, position = np.array([[1]]), np.array([POSITION])
    for run in range(-WARM_UP, RUNS):
        for at in (0, 1) if run % 2 else (1, 0):
            sessions[at].assume(position)
            started = time.perf_counter()
            sessions[at].run(token, position)
            if run >= 0:
                times[run, at] = 1000 * (time.perf_counter() - started)
    return [*np.median(times, 0).tolist(), float(np.median(times[:, 0] / times[:, 1]))]


@click.command(help=__doc__)
@click.argument("bundles", type=FOLDER, nargs=2, metavar="A B")
def command(bundles: tuple[Path, Path]) -> None:
    ratios = []
    for number in range(PROCESSES):
        order = bundles[:: -1 if number % 2 else 1]
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            a, b, ratio = pool.submit(measure, order).result()
        if number % 2:
            a, b, ratio = b, a, 1 / ratio
        ratios.append(ratio)
        print(f"{a:.2f} ms, {b:.2f} ms, ratio {ratio:.4f}", flush=True)
    print(f"ratio {statistics.geometric_mean(ratios):.4f}")
