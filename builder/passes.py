"""Times every pass of a round on this machine."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from outrider.builder.fitting import complete
from outrider.bundle.manifest import ROLES, Build, Cost, Manifest, round_rows
from outrider.engines.contract import step_rows
from outrider.engines.device import Device, Engine, Launch
from outrider.engines.samplers import CANDIDATES, DRAFT_SAMPLERS, MARKOV, sampler_buffers
from outrider.engines.session import Session
from outrider.errors import EngineError
from outrider.progress import Progress
from outrider.runtime.loaded import LoadedBundle

TIMED_RUNS = 7
# If other passes are fitted: once the runs of a pass have taken ENOUGH milliseconds, it is not run again. A pass that takes as
# long in one run needs no untimed run before it. Those that matter most have at least FEW_RUNS.
ENOUGH, FEW_RUNS = 150.0, 3
RECORDED = 8  # passes in one recording, so that the wait for its end counts little

PassKey = tuple[str, int, int, int]
"""Engine, rows, window and batch."""


class Timed(NamedTuple):
    """A pass to be timed."""

    run: Callable[[], None]  # returns when the work is done
    passes: int = 1  # per run


class Stopwatch:
    """Times passes in turn, so that a machine that slows down affects all of them equally."""

    def __init__(self, passes: Mapping[PassKey, Timed], long: float = math.inf):
        """Run each pass once, which binds buffers and touches memory.

        Args:
            long: milliseconds, compared with which preparing for a shape takes no time.
        """
        self._passes = passes
        self._times: dict[PassKey, list[float]] = {each: [] for each in passes}
        self._long = {each for each, timed in passes.items() if _milliseconds(timed) > long}

    def run(self, times: int = 1, wanted: Callable[[PassKey], bool] = lambda _: True) -> None:
        """Run each wanted pass `times` times.

        If an engine's last pass had another shape, the pass first runs once untimed unless it is long: a backend may have to
        prepare for the shape, and the rounds of a sequence seldom change theirs.
        """
        before: dict[str, tuple[int, int]] = {}
        for _ in range(times):
            for each, timed in self._passes.items():
                if not wanted(each):
                    continue
                name, rows, _, batch = each
                if before.get(name) != (rows, batch) and each not in self._long:
                    timed.run()
                before[name] = rows, batch
                self._times[each].append(max(round(_milliseconds(timed), 4), 1e-4))

    def needs_more(self, each: PassKey, least: int) -> bool:
        """Return whether a pass has run fewer than `least` times, or for less than `ENOUGH` in all."""
        return len(self._times[each]) < least or sum(self._times[each]) < ENOUGH

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


def _milliseconds(timed: Timed) -> float:
    """Run a pass, and return how long it took."""
    started = time.perf_counter()
    timed.run()
    return 1000 * (time.perf_counter() - started) / timed.passes


def measure(loaded: LoadedBundle, progress: Progress, *, fit: bool) -> dict[str, list[Cost]]:
    """Return the cost of every pass that a round may run, by engine. This also checks that every engine runs.

    If rounds are recorded, it is the cost of a pass in a recording.

    Args:
        loaded: the bundle, with slots for its batch.
        fit: whether to time only `few_passes`, long ones fewer times, and to fit the costs of the others.

    Raises:
        EngineError: an engine does not run here.
    """
    manifest, build, device = loaded.manifest, loaded.build, loaded.engines.device
    passes = few_passes if fit else all_passes
    costs: dict[str, list[Cost]] = defaultdict(list)
    for role, session in loaded.sessions.items():
        batches = [list(group) for _, group in itertools.groupby(passes(role, build), lambda each: each[3])]
        progress.stage(f"measuring the {role}", len(batches) * TIMED_RUNS)
        for batch in batches:
            stopwatch, wanted = Stopwatch(steps(session, build, batch), ENOUGH if fit else math.inf), {*batch}
            for _ in range(TIMED_RUNS):  # all windows in turn, so that other load affects them equally
                stopwatch.run(wanted=wanted.__contains__)
                if fit:
                    wanted = {each for each in wanted if stopwatch.needs_more(each, _least_runs(each, build))}
                progress.advance(1)
            costs[role] += stopwatch.costs()[role]
            del stopwatch  # it holds passes
            session.unbind()  # a backend records a limited number of them
    progress.stage("measuring the samplers", sum(len(passes(name, build)) for name in loaded.samplers))
    for name, engine in loaded.samplers.items():
        for each in passes(name, build):  # one at a time, because each holds its own logits
            stopwatch = Stopwatch({each: sampling(engine, device, manifest, build, each)})
            stopwatch.run(TIMED_RUNS)
            costs[name] += stopwatch.costs()[name]
            progress.advance(1)
    return {name: complete(timed, [each[1:] for each in all_passes(name, build)]) for name, timed in costs.items()}


def all_passes(name: str, build: Build) -> list[PassKey]:
    """Return the passes of one of `ENGINES`: those of the largest batch first, so that a lack of memory shows immediately.

    Passes of the models end at the end of every window, and a prompt's chunk in the smallest and the largest window that hold
    it. The batch sizes are powers of two, and the bundle's batch.
    """
    places = [(rows, 0) for rows in _round_rows(name, build)]
    if name in ROLES:
        of_rounds, chunk = _round_rows(name, build), build.max_prompt_chunk
        holding = [window for window in build.windows if window >= chunk]
        places = [
            (rows, window)
            for rows in sorted({*of_rounds, chunk})
            for window in build.windows
            if rows <= window and (rows in of_rounds or window in (holding[0], holding[-1]))
        ]
    batches = sorted({*(2**power for power in range(build.batch.bit_length())), build.batch}, reverse=True)
    return [(name, *place, batch) for batch in batches for place in places]


def few_passes(name: str, build: Build) -> list[PassKey]:
    """Return those of `all_passes` that a build times: all rows of one sequence in the smallest window, and the fewest and the
    most rows of a round also in the largest window and with the largest batch."""
    every = all_passes(name, build)
    first: dict[int, int] = {}
    for _, rows, window, _ in every:
        first.setdefault(rows, window)
    fewest, *_, most = (rows for rows in [1, *_round_rows(name, build)] if rows in first)

    def is_needed(rows: int, window: int, batch: int) -> bool:
        if rows in (fewest, most):
            return window in (first[rows], build.windows[-1]) and batch in (1, build.batch)
        return window == first[rows] and batch == 1

    return [each for each in every if is_needed(*each[1:])]


def _least_runs(each: PassKey, build: Build) -> int:
    """Return how often a pass runs at least, if others are fitted to it. What a round of one sequence takes decides about k."""
    _, rows, _, batch = each
    return FEW_RUNS if batch == 1 and rows in round_rows(each[0], build.k) else 1


def _round_rows(name: str, build: Build) -> list[int]:
    """Return the row counts of one of `ENGINES` in rounds, ascending."""
    if name in ROLES:
        return round_rows(name, build.k)
    return [1] if name in (*DRAFT_SAMPLERS, MARKOV) else step_rows(build.k)


def steps(session: Session, build: Build, passes: Iterable[PassKey]) -> dict[PassKey, Timed]:
    """Return these passes of a model, each at the end of its window."""
    return {
        (role, rows, window, batch): _step(session, rows, window - rows, batch, verifies=rows in round_rows(role, build.k))
        for role, rows, window, batch in passes
    }


def _step(session: Session, rows: int, position: int, batch: int, verifies: bool) -> Timed:
    """Return a pass of `rows` rows over the first `batch` slots. If it verifies, it computes the logits of all rows, and only
    one row is confirmed."""
    ids = np.zeros((batch, rows), dtype=np.int64)
    positions = np.full(batch, position, dtype=np.int64)
    certain = [1 if verifies else rows] * batch

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


def sampling(engine: Engine, device: Device, manifest: Manifest, build: Build, key: PassKey) -> Timed:
    """Return the run of a sampler, at temperature 1 and top_p 0.9 unless it is greedy."""
    name, rows, _, batch = key
    sizes = {"batch": batch, "rows": build.k[-1] + 1 if name == "draft_sampler" else rows, "edits": 1, "top": 1}
    tensors = sampler_buffers(device, name, sizes, manifest.vocab_rows, manifest.block_state)
    if "settings" in tensors:
        device.write(tensors["settings"], np.array([[1, 0, 0.9, 0, 1, 0, 0, 0]] * batch))
        tensors["candidates"].view()[...] = min(CANDIDATES[0], manifest.vocab_rows)
    launch = engine.bind(tensors)

    def run() -> None:
        launch()
        device.synchronize()

    return _recorded(device, engine.recordable, run, lambda: launch)
