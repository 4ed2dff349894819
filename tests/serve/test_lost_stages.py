"""A server whose target has stages in other processes, without Ray: what clients see until lost stages are back."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from outrider.backends.base import Engines
from outrider.backends.open import open_bundle, open_engines
from outrider.backends.remote_stages import RemoteStages
from outrider.backends.stage_chain import Sent
from outrider.backends.stage_host import Crossing
from outrider.engines.session import Session
from outrider.engines.sizes import Sizes
from outrider.errors import OutriderError, StageError
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.scheduler import Scheduler
from outrider.runtime.text.text import Text
from outrider.serve import lost_stages
from outrider.serve.deliveries import Result
from outrider.serve.engine import EngineThread, NotReadyError
from outrider.serve.metrics import Metrics
from outrider.tests.runtime.local_stages import LocalChain
from outrider.tests.support import build

SLOTS = 2


class Ended(NamedTuple):
    """What a request got."""

    tokens: list[int]
    last: Result


class Node:
    """Where the first stage of a target runs: it is lost after some passes, and may not be back at once."""

    def __init__(self) -> None:
        self.left: float = math.inf  # passes until it is lost
        self.away = threading.Event()
        self.connecting, self.reachable = threading.Event(), threading.Event()
        self.reachable.set()
        self.chains = 0

    def stages(self, engines: Engines, sizes: Sequence[Sizes]) -> Session:
        """For `Engines.elsewhere`."""

        def connect() -> LosableChain:
            self.connecting.set()
            assert self.reachable.wait(60)
            self.connecting.clear()
            if self.away.is_set():
                raise StageError("stage 1 found no place", "a hint")
            self.chains, self.left = self.chains + 1, math.inf
            return LosableChain(self, engines, sizes)

        return RemoteStages(connect, sizes[-1])


class LosableChain(LocalChain):
    def __init__(self, node: Node, engines: Engines, sizes: Sequence[Sizes]):
        super().__init__(engines, sizes)
        self.node = node

    def send(self, message: Crossing) -> Sent:
        if self.node.left <= 0:
            raise StageError("stage 1 died", "a hint")
        self.node.left -= 1
        return super().send(message)

    def check(self) -> None:
        if self.node.left < 0:
            raise StageError("stage 1 died", "a hint")


async def asked(engine: EngineThread, prompts: Sequence[list[int]], limit: int = 20) -> list[Ended]:
    """Submit requests together, and wait for all."""
    ended: list[list[Result]] = [[] for _ in prompts]
    requests = [(prompt, SamplingParams(max_new_tokens=limit, min_new_tokens=limit)) for prompt in prompts]
    await engine.submit(requests, lambda index, result: ended[index].append(result))

    def is_over(results: list[Result]) -> bool:
        return bool(results) and (isinstance(results[-1], OutriderError) or results[-1].finish_reason is not None)

    async with asyncio.timeout(60):
        while not all(map(is_over, ended)):
            await asyncio.sleep(0.01)
    tokens = [[token for event in each if not isinstance(event, OutriderError) for token in event.token_ids] for each in ended]
    return [Ended(*each) for each in zip(tokens, (each[-1] for each in ended), strict=True)]


@pytest.fixture(scope="module")
def bundle(trained_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lost") / "bundle"
    return build(trained_export, folder, stages="2", k=[1, 4], capacity=127, batch=SLOTS)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr(lost_stages, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr("outrider.serve.engine.LOOKING", 0.05)
    return Node()


@pytest.fixture
def engine(bundle: Path, node: Node) -> Iterator[EngineThread]:
    def load() -> Scheduler:
        manifest, of_bundle = open_bundle(bundle)
        engines = open_engines(bundle, manifest, of_bundle)
        engines.elsewhere = node.stages
        return Scheduler(Outrider(engines, Text.load(bundle, manifest), SLOTS))

    engine = EngineThread(bundle, load, Metrics(), timeout=60)
    engine.start()
    assert engine.loaded.wait(60)
    yield engine
    engine.stop()


def wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 15
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_all_get_an_error_and_later_ones_their_answers(engine: EngineThread, node: Node) -> None:
    """Those that run, read or wait when a stage is lost get its error. Until it is back, the server is not ready."""
    prompts = [[*range(5, 30)], [50, 60], [7, 8, 9], [*range(40, 90)]]
    want = [each.tokens for each in asyncio.run(asked(engine, prompts))]
    assert all(want)
    for passes, count in ((0, 1), (6, len(prompts))):
        before = node.chains
        asyncio.run(asked(engine, prompts[-1:]))  # its slot keeps it
        node.away.set()
        node.left = passes
        ended = asyncio.run(asked(engine, prompts[:count]))
        assert [str(each.last) for each in ended] == ["stage 1 died"] * count
        assert any(each.tokens for each in ended) == (passes > 0)
        assert all(tokens == whole[: len(tokens)] for (tokens, _), whole in zip(ended, want[:count], strict=True))
        wait(lambda: "found no place" in str(engine.failure))
        with pytest.raises(NotReadyError, match="the bundle cannot be run: stage 1 found no place"):
            engine.check()
        with pytest.raises(NotReadyError):
            asyncio.run(asked(engine, prompts[:1]))
        node.away.clear()
        wait(lambda: engine.failure is None)
        engine.check()
        for again, expected in ((prompts[-1:], want[-1:]), (prompts, want)):
            assert [each.tokens for each in asyncio.run(asked(engine, again))] == expected
        assert node.chains == before + 1


def test_a_stage_that_is_lost_while_nothing_runs_costs_no_request(engine: EngineThread, node: Node) -> None:
    ((want, _),) = asyncio.run(asked(engine, [[5, 6, 7]]))
    assert want
    for _ in range(2):
        before, node.left = node.chains, -1
        wait(lambda chains=before: node.chains > chains and engine.failure is None)  # type: ignore[misc]
        assert asyncio.run(asked(engine, [[5, 6, 7]]))[0].tokens == want


def test_a_request_that_comes_just_before_stages_are_replaced_does_not_wait(
    engine: EngineThread, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds the server ready, and the thread has begun to connect when it is submitted."""
    ready: property = vars(EngineThread)["scheduler"]

    def slowly(self: EngineThread) -> Scheduler:
        found: Scheduler = ready.__get__(self)
        if threading.current_thread().name != "engines" and node.reachable.is_set():
            node.reachable.clear()
            node.left = -1
            assert node.connecting.wait(15)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(EngineThread, "scheduler", property(slowly))
        with pytest.raises(NotReadyError, match="the bundle cannot be run: stage 1 died"):
            asyncio.run(asyncio.wait_for(asked(engine, [[5, 6, 7]]), 5))
    node.reachable.set()
    wait(lambda: engine.failure is None)
    assert asyncio.run(asked(engine, [[5, 6, 7]]))[0].tokens
