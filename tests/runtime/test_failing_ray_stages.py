"""What happens if a stage in a Ray cluster dies, hangs or is late, or the link to it stalls."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
import time
from contextlib import closing, suppress

import numpy as np
import psutil
import pytest

from outrider import Outrider, SamplingParams
from outrider.backends.open import open_bundle, open_engines
from outrider.errors import EngineError, StageError
from outrider.runtime.request import Event, Request
from outrider.runtime.scheduler import Scheduler
from outrider.serve.deliveries import Result
from outrider.serve.engine import EngineThread, NotReadyError
from outrider.serve.metrics import Metrics
from outrider.tests.nodes import hosts
from outrider.tests.runtime.ray_bundles import MACHINE, NODES, Bundles, engines, over, watched
from outrider.tests.runtime.stages import SLOTS
from outrider.tests.support import Made

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]


@over((NODES, "pair"), (MACHINE, "pair"))
def test_a_stage_that_dies_fails_both_halves(bundles: Made[Bundles], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the halves, with one error; and nothing waits for the pass that is lost."""
    with closing(Outrider.load(bundles[name].staged, slots=None, stage_cores=1)) as staged:
        watched(monkeypatch, lambda count: [host.kill() for host in hosts()] if count == 2 else None)
        scheduler, failed = Scheduler(staged, k=4), list[tuple[Request, EngineError]]()
        requests = [scheduler.submit([token, 6, 7], SamplingParams(max_new_tokens=20)) for token in (5, 10, 11)]
        began = time.monotonic()
        while scheduler.busy:
            failed += [(request, event) for request, event in scheduler.step() if isinstance(event, EngineError)]
        assert time.monotonic() - began < 30
    assert sorted(requests.index(request) for request, _ in failed) == [0, 1, 2]
    assert len({str(error) for _, error in failed}) == 1
    assert "ActorDiedError" in str(failed[0][1])


@over((NODES, "pair"), (MACHINE, "pair"))
def test_a_server_replaces_a_stage_that_dies(bundles: Made[Bundles], name: str) -> None:
    """Requests that run or wait get its error, and later ones their texts."""
    bundle = bundles[name].staged
    engine = EngineThread(bundle, lambda: Scheduler(Outrider.load(bundle, slots=None, stage_cores=1)), Metrics(), timeout=60)
    engine.start()
    assert engine.loaded.wait(120)

    async def ask(first: int) -> list[list[Result]]:
        results, over = list[list[Result]]([[] for _ in range(2 * SLOTS)]), asyncio.Event()

        def take(index: int, result: Result) -> None:
            results[index].append(result)
            if all(each and getattr(each[-1], "finish_reason", "error") is not None for each in results):
                over.set()

        params = SamplingParams(max_new_tokens=12, min_new_tokens=12)
        await engine.submit([([first + index, 6, 7], params) for index in range(2 * SLOTS)], take)
        await asyncio.wait_for(over.wait(), 60)
        return results

    def texts(results: list[list[Result]]) -> list[str]:
        return ["".join(event.text for event in each if isinstance(event, Event)) for each in results]

    want = texts(asyncio.run(ask(5)))
    assert all(want)
    for _ in range(2):
        hosts()[0].kill()
        errors = asyncio.run(ask(50))
        for (error,) in errors:
            assert isinstance(error, StageError)
            assert re.match(r"stage \d \(layers \d-\d\) failed: ActorDiedError", str(error))
        for _ in range(600):
            with suppress(NotReadyError):
                engine.check()
                break
            time.sleep(0.05)
        assert texts(asyncio.run(ask(5))) == want
    engine.stop()


@over((NODES, "pair"), (MACHINE, "pair"))
def test_a_stage_that_hangs_is_not_waited_for_longer_than_the_limit(bundles: Made[Bundles], name: str) -> None:
    """It may go on afterwards: nothing listens any more, and what it gives late is taken for no other pass."""
    session = engines(bundles[name].staged, passing=2).session("target", 1)
    ids, start = np.array([[5, 6, 7]]), np.array([0])
    whole = open_engines(bundles[name].whole, *open_bundle(bundles[name].whole)).session("target", 1)
    np.testing.assert_array_equal(session.run(ids, start), whole.run(ids, start))
    stopped = hosts()
    for host in stopped:
        host.send_signal(signal.SIGSTOP)
    with pytest.raises(EngineError, match=r"stage 1 \(layers 0-1\) did not answer within 2 seconds"):
        session.run(ids, start)
    for host in stopped:
        with suppress(psutil.NoSuchProcess):
            host.send_signal(signal.SIGCONT)
    began = time.monotonic()
    session.clear(0)
    with pytest.raises(EngineError, match="stage 1"):  # caches may differ, so no later pass runs
        session.run(ids, start)
    assert time.monotonic() - began < 1
    session.reopen()
    for token in range(10, 20):
        np.testing.assert_array_equal(session.run(ids + token, start), whole.run(ids + token, start))


@over((NODES, "pair"))
def test_a_link_that_stalls_is_not_waited_for_longer_than_the_limit(bundles: Made[Bundles], name: str) -> None:
    """What stands for the link are Ray's processes that send results of more than `INLINE` bytes from node to node."""
    session = engines(bundles[name].staged, passing=3).session("target", 1)
    ids, start = np.array([[5, 6, 7]]), np.array([0])
    want = session.run(ids, start).copy()
    links = [each for each in psutil.Process().children(recursive=True) if each.name() == "raylet"]
    stalled = [each for each in links if "--head" not in each.cmdline()]
    assert len(stalled) == 2
    for each in stalled:
        each.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(StageError, match=r"^(stage \d .* did not answer within 3 seconds|what stage 2 .* gave did not arrive)"):
        session.run(ids, start)
    assert 3 <= time.monotonic() - began < 6
    for each in stalled:
        each.send_signal(signal.SIGCONT)
    with pytest.raises(StageError):  # what the link brings late is taken for no other pass
        session.run(ids, start)
    session.reopen()
    np.testing.assert_array_equal(session.run(ids, start), want)


@over((NODES, "pair"), (MACHINE, "pair"))
def test_a_stage_that_answers_late_but_in_time_is_waited_for(bundles: Made[Bundles], name: str) -> None:
    session = engines(bundles[name].staged, passing=20).session("target", 1)
    ids, start = np.array([[5, 6, 7]]), np.array([0])
    want, began = session.run(ids, start).copy(), time.monotonic()
    stopped = hosts()[1]
    stopped.send_signal(signal.SIGSTOP)
    timer = threading.Timer(2, stopped.send_signal, [signal.SIGCONT])
    timer.start()
    np.testing.assert_array_equal(session.run(ids, start), want)
    assert time.monotonic() - began > 1.9
    timer.join()
