"""A server over a Ray cluster whose node leaves and returns, has another bundle for a while, or has no memory."""

from __future__ import annotations

import asyncio
import gc
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from outrider import Outrider, SamplingParams
from outrider.backends import stage_chain
from outrider.backends.open import open_bundle, open_engines
from outrider.backends.remote_stages import RayStages
from outrider.engines.session import Session
from outrider.errors import OutriderError, StageError
from outrider.runtime.scheduler import Scheduler
from outrider.serve.deliveries import Result
from outrider.serve.engine import EngineThread, NotReadyError
from outrider.serve.metrics import Metrics
from outrider.tests.nodes import SIZE, hosts, ray_nodes
from outrider.tests.support import build

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Room for a stage on another node than that of this process."""
    with ray_nodes(0, 1) as nodes:
        yield nodes


@pytest.fixture(autouse=True)
def room() -> None:
    """End the stages of earlier tests, which take the only core, and belong to a connection to Ray."""
    gc.collect()


@pytest.fixture(scope="module")
def bundle(trained_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recovery") / "bundle"
    return build(trained_export, folder, stages="2", k=[1, 4], capacity=127, batch=2)


@pytest.fixture
def engine(cluster: Cluster, bundle: Path) -> Iterator[EngineThread]:
    engine = EngineThread(bundle, lambda: Scheduler(Outrider.load(bundle, slots=None, stage_cores=1)), Metrics(), timeout=60)
    engine.start()
    assert engine.loaded.wait(120)
    yield engine
    engine.stop()


def answer(engine: EngineThread) -> str:
    """The answer to a request."""

    async def ask() -> str:
        results: asyncio.Queue[Result] = asyncio.Queue()
        request = [5, 6, 7], SamplingParams(max_new_tokens=12, min_new_tokens=12)
        await engine.submit([request], lambda _, result: results.put_nowait(result))
        text, over = "", False
        while not over:
            result = await asyncio.wait_for(results.get(), 60)
            if isinstance(result, OutriderError):
                raise result
            text, over = text + result.text, result.finish_reason is not None
        return text

    return asyncio.run(ask())


def wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_server_recovers_when_a_node_has_left_and_returned(engine: EngineThread, cluster: Cluster) -> None:
    want = answer(engine)
    assert want
    (node,) = cluster.worker_nodes
    cluster.remove_node(node, allow_graceful=False)
    wait(lambda: engine.failure is not None)
    with pytest.raises(NotReadyError, match=r"stage 1 \(layers 0-\d\) failed: Actor(Died|Unavailable)Error"):
        answer(engine)
    cluster.add_node(num_cpus=1, **SIZE)
    wait(lambda: engine.failure is None)
    assert answer(engine) == want


def test_a_server_refuses_another_bundle_until_the_right_one_is_back(
    engine: EngineThread, bundle: Path, trained_export: Path, tmp_path: Path
) -> None:
    other = build(trained_export, bundle.with_name("other"), stages="2", k=[1], capacity=127, batch=2)
    want, aside = answer(engine), bundle.with_name("aside")
    bundle.rename(aside)
    other.rename(bundle)
    for host in hosts(1):
        host.kill()
    wait(lambda: "its machine has another bundle at" in str(engine.failure))
    with pytest.raises(NotReadyError, match=r"stage 1 \(layers 0-\d\): its machine has another bundle at"):
        answer(engine)
    bundle.rename(other)
    aside.rename(bundle)
    wait(lambda: engine.failure is None)
    assert answer(engine) == want


def opened(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.setattr(stage_chain, "OPENING", 60)
    engines = open_engines(bundle, *open_bundle(bundle))
    engines.elsewhere = RayStages()
    return engines.session("target", 2)


def test_caches_that_are_larger_than_the_memory_of_a_node_are_refused(
    cluster: Cluster, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray.shutdown()
    hook = {"worker_process_setup_hook": "outrider.tests.nodes.without_memory"}
    ray.init(address=cluster.address, log_to_driver=False, runtime_env=hook)
    try:
        with pytest.raises(StageError) as caught:
            opened(bundle, monkeypatch)
    finally:
        ray.shutdown()
        ray.init(address=cluster.address, log_to_driver=False)
    refusal = r"stage 1 \(layers 0-\d\): no memory for a cache of 2 x 127 positions: it takes [\d,]+ bytes, and there are 4,096"
    assert re.fullmatch(refusal, str(caught.value))


def test_a_stage_that_ray_ends_for_lack_of_memory_has_died(
    cluster: Cluster, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (node,) = cluster.worker_nodes
    cluster.remove_node(node)
    full = {"RAY_memory_usage_threshold": "0.01", "RAY_memory_monitor_refresh_ms": "100"}
    cluster.add_node(num_cpus=1, env_vars=full, **SIZE)
    with pytest.raises(StageError, match=r"^stage 1 \(layers 0-\d\) failed: (Actor(Died|Unavailable)|OutOfMemory)Error$"):
        session = opened(bundle, monkeypatch)
        for _ in range(300):  # it may have loaded before
            session.check()
            time.sleep(0.1)
