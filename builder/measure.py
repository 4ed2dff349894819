"""What every pass of a round costs on this machine: the bundle's engines run, and timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from outrider.engines.bundle import open_engines
from outrider.engines.contract import CANDIDATES, DRAFTERS, sampler_tensors
from outrider.engines.device import Device, Engine, host_buffer
from outrider.engines.manifest import Build, Cost, Manifest
from outrider.engines.progress import Progress
from outrider.engines.session import Session

TIMED_RUNS = 7


def measure(folder: Path, manifest: Manifest, build: Build, progress: Progress) -> dict[str, list[Cost]]:
    """The cost of every pass that a round may make, by engine; that the engines run at all is checked with it.

    Those of the models are measured at the end of every window, of a prompt's chunk in the smallest and the largest that
    hold it; for batches that double up to the bundle's.

    Raises:
        EngineError: one does not.
    """
    engines = open_engines(folder, manifest, build)
    batches = [2**power for power in range(build.batch.bit_length())]
    batches += [build.batch] if build.batch not in batches else []
    batches.reverse()  # where there is no memory for the largest, that is known at once
    passes = sorted({1, 2, *(k + 1 for k in build.k)})
    chunk = build.max_prompt_chunk
    costs: dict[str, list[Cost]] = {}
    for role in manifest.roles:
        costs[role] = []
        progress.stage(f"measuring the {role}", len(batches) * len(build.windows))
        for batch in batches:
            session = engines.session(role, batch)
            holding = [window for window in build.windows if window >= chunk]
            for window in build.windows:
                sizes = [rows for rows in passes if rows <= window]
                sizes += [chunk] if chunk not in sizes and window in (holding[0], holding[-1]) else []
                for rows in sizes:
                    step = _step(session, rows, window - rows, logits=rows in passes)
                    costs[role].append(_cost(step, rows, window, batch))
                    del step  # it holds the session
                progress.advance(1)
            del session  # one model in memory at a time
    progress.stage("measuring the samplers")
    for name in manifest.samplers:
        engine, sizes = engines.sampler(name), [1] if name in DRAFTERS else passes
        costs[name] = [
            _cost(_sampling(engine, engines.device, name, manifest, build, rows, batch), rows, 0, batch)
            for batch in batches
            for rows in sizes
        ]
    return costs


def _step(session: Session, rows: int, position: int, logits: bool) -> Callable[[], None]:
    """A pass of so many rows."""
    ids = np.zeros((session.batch, rows), dtype=np.int64)
    positions = np.full(session.batch, position, dtype=np.int64)

    def run() -> None:
        session.write(ids, positions, logits)
        session.device.synchronize()

    return run


def _sampling(
    engine: Engine, device: Device, name: str, manifest: Manifest, build: Build, rows: int, batch: int
) -> Callable[[], None]:
    """A run of a sampler, where it is not greedy at temperature 1 and top_p 0.9."""
    sizes = {"batch": batch, "rows": build.k[-1] + 1 if name == "drafter" else rows, "edits": 1, "top": 1}
    inputs, outputs = sampler_tensors(name, *manifest.widths)
    tensors = {
        each.name: device.zeros(
            tuple(size if isinstance(size, int) else sizes[size] for size in each.shape), each.dtype, "the samplers"
        )
        for each in (*inputs, *outputs)
    }
    candidates = 1
    if "settings" in tensors:
        device.write(tensors["settings"], np.array([[1, 0, 0.9, 0, 1, 0, 0, 0]] * batch))
        candidates = min(CANDIDATES[0], manifest.widths[0])
    if "candidates" in tensors:
        tensors["candidates"] = host_buffer(np.array([candidates], dtype=np.int64))
    launch = engine.bind(tensors)

    def run() -> None:
        launch()
        device.synchronize()

    return run


def _cost(run: Callable[[], None], rows: int, window: int, batch: int) -> Cost:
    run()
    times = []
    for _ in range(TIMED_RUNS):
        started = time.perf_counter()
        run()
        times.append(max(round(1000 * (time.perf_counter() - started), 4), 1e-4))
    return Cost(
        rows=rows,
        window=window,
        batch=batch,
        median=statistics.median(times),
        fastest=min(times),
        slowest=max(times),
        runs=TIMED_RUNS,
    )
