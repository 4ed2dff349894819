"""Times every pass of a round on this machine."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from outrider.backends.base import Engines
from outrider.bundle.manifest import Build, Cost, Manifest, round_rows
from outrider.engines.contract import step_rows
from outrider.engines.device import Device, Engine, Launch
from outrider.engines.samplers import CANDIDATES, DRAFT_SAMPLERS, MARKOV, sampler_buffers
from outrider.engines.session import Session
from outrider.errors import EngineError
from outrider.progress import Progress

TIMED_RUNS = 7
RECORDED = 8  # passes in one recording, so that the wait for its end counts little

PassKey = tuple[str, int, int, int]
"""Engine, rows, window and batch."""


class Timed(NamedTuple):
    """A pass to be timed."""

    run: Callable[[], None]  # returns when the work is done
    passes: int = 1  # per run


class Stopwatch:
    """Times passes in turn, so that a machine that slows down affects all of them equally."""

    def __init__(self, passes: Mapping[PassKey, Timed]):
        self._passes = passes
        self._times: dict[PassKey, list[float]] = {each: [] for each in passes}
        for timed in passes.values():
            timed.run()  # the first run binds buffers and touches memory

    def run(self, times: int = 1, wanted: Callable[[PassKey], bool] = lambda _: True) -> None:
        """Run each wanted pass `times` times.

        If an engine's last pass had another shape, the pass first runs once untimed: a backend may have to prepare for the
        shape, and the rounds of a sequence seldom change theirs.
        """
        before: dict[str, tuple[int, int]] = {}
        for _ in range(times):
            for each, timed in self._passes.items():
                if not wanted(each):
                    continue
                name, rows, _, batch = each
                if before.get(name) != (rows, batch):
                    timed.run()
                before[name] = rows, batch
                started = time.perf_counter()
                timed.run()
                self._times[each].append(max(round(1000 * (time.perf_counter() - started) / timed.passes, 4), 1e-4))

    def costs(self) -> dict[str, list[Cost]]:
        """Return the costs measured so far, by engine."""
        costs: dict[str, list[Cost]] = defaultdict(list)
        for (name, rows, window, batch), times in self._times.items():
            costs[name].append(
                Cost(
                    rows=rows,
                    window=window,
                    batch=batch,
                    median=statistics.median(times),
                    fastest=min(times),
                    slowest=max(times),
                    runs=len(times),
                )
            )
        return dict(costs)


def measure(engines: Engines, progress: Progress) -> dict[str, list[Cost]]:
    """Return the cost of every pass that a round may run, by engine. This also checks that every engine runs.

    If rounds are recorded, it is the cost of a pass in a recording. Passes of the models are measured at the end of every
    window, and a prompt's chunk in the smallest and the largest window that hold it. The batch sizes are powers of two, and the
    bundle's batch.

    Raises:
        EngineError: an engine does not run here.
    """
    manifest, build = engines.manifest, engines.build
    batches = [2**power for power in range(build.batch.bit_length())]
    batches += [build.batch] if build.batch not in batches else []
    batches.reverse()  # the largest first, so that a lack of memory shows immediately
    costs: dict[str, list[Cost]] = defaultdict(list)
    for role in manifest.roles:
        progress.stage(f"measuring the {role}", len(batches) * TIMED_RUNS)
        for batch in batches:
            session = engines.session(role, batch)
            stopwatch = Stopwatch(steps(session, role, build, build.windows))
            for _ in range(TIMED_RUNS):  # all windows in turn, so that other load affects them equally
                stopwatch.run()
                progress.advance(1)
            costs[role] += stopwatch.costs()[role]
            del stopwatch  # it holds the session
            del session  # one model in memory at a time
    progress.stage("measuring the samplers")
    for name in manifest.samplers:
        engine = engines.sampler(name)
        for batch in batches:
            for rows in sampler_rows(name, build):  # one at a time, because each holds its own logits
                stopwatch = Stopwatch(sampling(engine, engines.device, name, manifest, build, rows, batch))
                stopwatch.run(TIMED_RUNS)
                costs[name] += stopwatch.costs()[name]
    return dict(costs)


def steps(session: Session, role: str, build: Build, windows: Sequence[int]) -> dict[PassKey, Timed]:
    """Return the passes of a model in rounds and prompts, each at the end of its window."""
    chunk = build.max_prompt_chunk
    holding = [window for window in build.windows if window >= chunk]
    passes: dict[PassKey, Timed] = {}
    of_rounds = round_rows(role, build.k)
    for rows in sorted({*of_rounds, chunk}):
        for window in windows:
            if rows <= window and (rows in of_rounds or window in (holding[0], holding[-1])):
                passes[role, rows, window, session.batch] = _step(session, rows, window - rows, verifies=rows in of_rounds)
    return passes


def sampler_rows(name: str, build: Build) -> list[int]:
    """Return the row counts of a sampler."""
    return [1] if name in (*DRAFT_SAMPLERS, MARKOV) else step_rows(build.k)


def _step(session: Session, rows: int, position: int, verifies: bool) -> Timed:
    """Return a pass of `rows` rows. If it verifies, it computes the logits of all rows, and only one row is confirmed."""
    ids = np.zeros((session.batch, rows), dtype=np.int64)
    positions = np.full(session.batch, position, dtype=np.int64)
    certain = [1 if verifies else rows] * session.batch

    def run() -> None:
        session.assume(positions)
        session.write(ids, positions, logits=verifies, certain=certain)
        session.device.synchronize()

    def launch() -> Launch:
        session.assume(positions)
        return session.prepare(ids, positions, logits=verifies, certain=certain)

    return _recorded(session.device, session.recordable, run, launch)


def _recorded(device: Device, recordable: bool, run: Callable[[], None], launch: Callable[[], Launch]) -> Timed:
    """Return a run as in a recorded round, if the device records and the engine allows it.

    Args:
        launch: returns a launch of the run, which does not wait.
    """
    if device.synchronous or not recordable:
        return Timed(run)
    run()  # a launch must have run before it is recorded
    try:
        replay = device.capture([launch()] * RECORDED)
    except EngineError:  # then rounds are not recorded either
        return Timed(run)

    def run_recorded() -> None:
        replay()
        device.synchronize()

    return Timed(run_recorded, RECORDED)


def sampling(
    engine: Engine, device: Device, name: str, manifest: Manifest, build: Build, rows: int, batch: int
) -> dict[PassKey, Timed]:
    """Return the run of a sampler over `rows` rows, at temperature 1 and top_p 0.9 unless it is greedy."""
    sizes = {"batch": batch, "rows": build.k[-1] + 1 if name == "drafter" else rows, "edits": 1, "top": 1}
    tensors = sampler_buffers(device, name, sizes, manifest.vocab_rows, manifest.block_state)
    if "settings" in tensors:
        device.write(tensors["settings"], np.array([[1, 0, 0.9, 0, 1, 0, 0, 0]] * batch))
        tensors["candidates"].view()[...] = min(CANDIDATES[0], manifest.vocab_rows)
    launch = engine.bind(tensors)

    def run() -> None:
        launch()
        device.synchronize()

    return {(name, rows, 0, batch): _recorded(device, engine.recordable, run, lambda: launch)}
