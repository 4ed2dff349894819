"""What every pass of a round costs on this machine: the bundle's engines run, and timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from outrider.engines.bundle import open_engines
from outrider.engines.contract import CANDIDATES, DRAFTERS, SAMPLERS, sampler_tensors
from outrider.engines.device import Device, Engine, host_buffer
from outrider.engines.manifest import ROLES, Build, Cost, Manifest
from outrider.engines.progress import Progress
from outrider.engines.session import Session

TIMED_RUNS = 7


def measure(folder: Path, manifest: Manifest, build: Build, progress: Progress) -> dict[str, dict[str, Cost]]:
    """The cost of every pass that a round may make; that the engines run at all is checked with it.

    Raises:
        EngineError: one does not.
    """
    engines = open_engines(folder, manifest, build)
    passes = [k + 1 for k in build.k]
    costs = {}
    for role in ROLES:
        progress.stage(f"measuring the {role}")
        session = engines.session(role, build.batch)
        sizes = {1, 2, *passes}
        costs[role] = {str(rows): _cost(_step(session, rows, logits=True)) for rows in sorted(sizes)}
        chunk = str(build.max_prompt_chunk)
        costs[role].setdefault(chunk, _cost(_step(session, build.max_prompt_chunk, logits=False)))
        del session  # one model in memory at a time
    progress.stage("measuring the samplers")
    for name in SAMPLERS:
        engine, sizes = engines.sampler(name), [1] if name in DRAFTERS else [1, *passes]
        costs[name] = {str(rows): _cost(_sampling(engine, engines.device, name, manifest, build, rows)) for rows in sizes}
    return costs


def _step(session: Session, rows: int, logits: bool) -> Callable[[], None]:
    """A pass of so many rows."""
    ids = np.zeros((session.batch, rows), dtype=np.int64)
    positions = np.zeros(session.batch, dtype=np.int64)

    def run() -> None:
        session.write(ids, positions, logits)
        session.device.synchronize()

    return run


def _sampling(engine: Engine, device: Device, name: str, manifest: Manifest, build: Build, rows: int) -> Callable[[], None]:
    """A run of a sampler, where it is not greedy at temperature 1 and top_p 0.9, for one sequence."""
    sizes = {"batch": 1, "rows": build.k[-1] + 1 if name == "drafter" else rows, "edits": 1, "top": 1}
    widths = {role: model.vocab_rows for role, model in manifest.models.items()}
    inputs, outputs = sampler_tensors(name, widths["target"], widths["draft"])
    tensors = {
        each.name: device.zeros(
            tuple(size if isinstance(size, int) else sizes[size] for size in each.shape), each.dtype, "the samplers"
        )
        for each in (*inputs, *outputs)
    }
    candidates = 1
    if "settings" in tensors:
        device.write(tensors["settings"], np.array([[1, 0, 0.9, 0, 1, 0, 0, 0]]))
        candidates = min(CANDIDATES[0], widths["target"])
    if "candidates" in tensors:
        tensors["candidates"] = host_buffer(np.array([candidates], dtype=np.int64))
    launch = engine.bind(tensors)

    def run() -> None:
        launch()
        device.synchronize()

    return run


def _cost(run: Callable[[], None]) -> Cost:
    run()
    times = []
    for _ in range(TIMED_RUNS):
        started = time.perf_counter()
        run()
        times.append(round(1000 * (time.perf_counter() - started), 4))
    return Cost(median=statistics.median(times), fastest=min(times), slowest=max(times), runs=TIMED_RUNS)
