"""Measure what it takes to cross from stage to stage in other processes, over Ray.

The target's passes alternate between three sessions: all stages in one process, the others in processes connected by a compiled
graph of Ray, and the same called one after the other. In the cluster at RAY_ADDRESS, stages may be on other nodes, where there
is no graph. Prints the median of each in milliseconds, and how much longer a pass takes per hop over Ray, in microseconds: the
median, and the range of the middle 80%. A pass makes as many hops as there are stages: from one process to the next, and from
the last actor back. With OMP_NUM_THREADS=1, the stages have a thread each in all three.

At last it prints a pass in one process as a multiple of the time that its stages took in it, and how much longer it takes, per
stage beside the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt

from outrider.backends.open import open_bundle, open_engines
from outrider.backends.remote_stages import RayStages, RemoteStages
from outrider.engines.cluster import connect
from outrider.engines.device import Launch
from outrider.engines.session import Pass, Session
from outrider.engines.staged_session import StagedSession
from outrider.errors import UsageError
from outrider.experiments.measure import arguments

POSITION, WARM_UP = 100, 20
WAYS = {"one process": None, "graph": RayStages(), "calls": RayStages(graph=False)}


def measure(sessions: list[Session], rows: int, repeat: int) -> npt.NDArray[np.float64]:
    """Return the milliseconds of each pass [repeat, sessions]."""
    tokens, position = np.ones((1, rows), dtype=np.int64), np.array([POSITION])
    times = np.empty((repeat, len(sessions)))
    for run in range(-WARM_UP, repeat):
        for at in range(len(sessions)):
            session = sessions[(at + run) % len(sessions)]
            session.assume(position)
            started = time.perf_counter()
            session.write(tokens, position, logits=True)
            if run >= 0:
                times[run, (at + run) % len(sessions)] = 1000 * (time.perf_counter() - started)
    return times


def time_stages(session: StagedSession) -> list[float]:
    """From now on, add the milliseconds of each stage in each pass to the list that is returned."""
    spent = list[float]()

    def timed(bind: Callable[[Pass], Launch], buffers: Pass) -> Launch:
        launch = bind(buffers)

        def run() -> None:
            started = time.perf_counter()
            launch()
            spent.append(1000 * (time.perf_counter() - started))

        return run

    for stage in session.stages:
        stage.bind = partial(timed, stage.bind)  # type: ignore[method-assign]
    session.unbind()
    return spent


@click.command(help=__doc__)
@arguments.bundle
@click.option("--rows", multiple=True, type=int, default=(1, 5), show_default=True, help="Rows of a pass; repeat for several.")
@click.option("--repeat", type=click.IntRange(1), default=300, show_default=True, help="Number of passes.")
def command(bundle: Path, rows: tuple[int, ...], repeat: int) -> None:
    sessions, manifest, build = dict[str, Session](), *open_bundle(bundle)
    others = len(build.stages) - 1
    if others < 1:
        raise UsageError("this bundle's target is in one piece", "build it with --stages")
    connect(2 * others)
    for name, way in WAYS.items():
        engines = open_engines(bundle, manifest, build)
        engines.elsewhere = way
        session = sessions[name] = engines.session("target", 1)
        assert isinstance(session, StagedSession)
        first = session.stages[0]
        if isinstance(first, RemoteStages) and first.is_graph != (name == "graph"):
            del sessions[name]
    for count in rows:
        times = dict(zip(sessions, measure([*sessions.values()], count, repeat).T, strict=True))
        print(f"{count} rows: " + ", ".join(f"{name} {np.median(each):.2f} ms" for name, each in times.items()))
        for name in [*times][1:]:
            low, middle, high = np.quantile(1000 * (times[name] - times["one process"]) / (others + 1), (0.1, 0.5, 0.9))
            print(f"    {name}: {middle:.0f} us per hop ({low:.0f}-{high:.0f})", flush=True)
    whole = sessions["one process"]
    assert isinstance(whole, StagedSession)
    spent = time_stages(whole)
    for count in rows:
        spent.clear()
        passes = measure([whole], count, repeat)[:, 0]
        of_stages = np.sum(np.reshape(spent, (-1, others + 1))[WARM_UP:], axis=1)
        low, middle, high = np.quantile(passes / of_stages, (0.1, 0.5, 0.9))
        print(f"{count} rows in one process: {middle:.3f} of the sum of the stages ({low:.3f}-{high:.3f})", flush=True)
        low, middle, high = np.quantile(1000 * (passes - of_stages) / others, (0.1, 0.5, 0.9))
        print(f"    {middle:.0f} us per stage beside the last ({low:.0f}-{high:.0f})", flush=True)
