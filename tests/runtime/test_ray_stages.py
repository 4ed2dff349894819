"""A target whose stages run on several nodes of a Ray cluster, and what happens if one of them fails."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import pytest
from click.testing import CliRunner

import outrider
from outrider import Outrider, SamplingParams
from outrider.backends import stage_chain
from outrider.backends.base import Engines
from outrider.backends.open import open_bundle, open_engines
from outrider.backends.remote_stages import RayStages
from outrider.backends.stage_chain import Chain, Sent
from outrider.backends.stage_host import Crossing, PassedOn
from outrider.engines.device import Cpu
from outrider.engines.staged_session import StagedSession
from outrider.errors import EngineError, StageError
from outrider.experiments.measure.__main__ import main
from outrider.export.pair import export_pair
from outrider.runtime.request import Event, Request
from outrider.runtime.scheduler import Scheduler
from outrider.serve.deliveries import Result
from outrider.serve.engine import EngineThread, NotReadyError
from outrider.serve.metrics import Metrics
from outrider.tests.nodes import hosts, ray_nodes
from outrider.tests.runtime.stages import SLOTS, alone, at_once, loaded, results, together
from outrider.tests.support import ROOT, Made, build

pytestmark = pytest.mark.slow
HYBRID = str(ROOT / "examples" / "tiny-hybrid" / "target")
STAGES = {"pair": "3", "head": "2", "hybrid": "3", "openvino": "3"}
MACHINE, NODES = "one machine", "a node each"


class Bundles(NamedTuple):
    """A target in one piece and in stages."""

    whole: Path
    staged: Path


@pytest.fixture(scope="module", autouse=True)
def cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """Room for two stages on the node of this process, which has the last one, or on a node for each."""
    with ray_nodes(2, 0) if request.param == MACHINE else ray_nodes(0, 2):
        yield


over_nodes = pytest.mark.parametrize("cluster", [NODES], indirect=True)


def over(*cases: tuple[str, str]) -> pytest.MarkDecorator:
    """Run a test in these clusters, over these bundles."""
    return pytest.mark.parametrize(("cluster", "name"), cases, indirect=["cluster"], scope="module")


@pytest.fixture(scope="module")
def bundles(
    shipped_export: Path,
    drafter_exports: Callable[[str, str], Path],
    once: Callable[[str, Callable[[Path], object]], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Made[Bundles]:
    folder = tmp_path_factory.mktemp("ray")

    def export(name: str) -> Path:
        if name == "hybrid":
            return once("hybrid-fp32", lambda output: export_pair(HYBRID, None, output, precision="fp32"))
        return drafter_exports("fp32", "trained head") if name == "head" else shipped_export

    def make(name: str) -> Bundles:
        backend = "openvino" if name == "openvino" else "onnxruntime"
        source, made = export(name), Bundles(folder / f"{name} whole", folder / f"{name} staged")
        for path, stages in zip(made, (None, STAGES[name]), strict=True):
            loaded(source, path, stages, backend=backend).close()
        return made

    return Made(make)


def engines(bundle: Path, passing: float = 60) -> Engines:
    opened = open_engines(bundle, *open_bundle(bundle))
    opened.elsewhere = RayStages(passing=passing)
    return opened


@over(*((where, name) for where in (NODES, MACHINE) for name in ("pair", "head", "hybrid")), (NODES, "openvino"))
def test_texts_over_nodes_are_those_of_the_whole(bundles: Made[Bundles], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and sampled, free and under grammars, alone and in halves that alternate, with every drafter of the bundle."""
    whole = Outrider.load(bundles[name].whole, slots=None)
    with closing(Outrider.load(bundles[name].staged, slots=None, stage_cores=1)) as staged:
        assert len(hosts(int(STAGES[name]) - 1)) == int(STAGES[name]) - 1
        want = alone(whole, 0, None, 8)
        assert alone(staged, 0, None, 8) == want
        assert alone(staged, "auto", None, 8) == want
        for k, drafter in [(4, each) for each in whole.drafters] + [(1, whole.drafters[0])]:
            assert alone(staged, k, drafter, 8) == want, (k, drafter)
        assert together(staged, "auto") == together(whole, 0)
        under_way = watched(monkeypatch)
        for size in (0, 4, "auto"):
            assert at_once(staged, size, 8) == want, size
        assert max(under_way) == 2
        assert under_way.count(2) > len(under_way) / 6  # answers are short, and prompts are read in between


def watched(monkeypatch: pytest.MonkeyPatch, then: Callable[[int], object] = lambda _: None) -> list[int]:
    """Return how many passes are under way, whenever one is sent or received. Call a function before one is waited for."""
    send, receive, counts = Chain.send, Chain.receive, [0]

    def sending(self: Chain, message: Crossing) -> Sent:
        sent = send(self, message)
        counts.append(counts[-1] + 1)
        return sent

    def receiving(self: Chain, sent: Sent) -> PassedOn:
        then(counts[-1])
        given = receive(self, sent)
        counts.append(counts[-1] - 1)
        return given

    monkeypatch.setattr(Chain, "send", sending)
    monkeypatch.setattr(Chain, "receive", receiving)
    return counts


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


@over((NODES, "pair"), (NODES, "hybrid"), (NODES, "openvino"), (MACHINE, "pair"), (MACHINE, "hybrid"))
def test_nodes_compute_the_same_bits(bundles: Made[Bundles], name: str) -> None:
    """In every pass, and in the caches, also after copies and snapshots."""
    whole, staged = (open_engines(each, *open_bundle(each)) for each in bundles[name])
    staged.elsewhere = RayStages()
    want, got = ([*map(np.array, results(each.session("target", SLOTS)))] for each in (whole, staged))
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@over((MACHINE, "head"))
def test_hops_and_halves_are_measured(bundles: Made[Bundles], name: str) -> None:
    done = CliRunner().invoke(main, ["hops", str(bundles[name].staged), "--repeat", "3", "--rows", "5"])
    assert done.exit_code == 0, done.output
    assert re.findall(r"^ *([\w ]+):", done.stdout, re.MULTILINE) == ["5 rows", "graph", "calls", "5 rows in one process"]
    ratio, added = (line.split() for line in done.stdout.splitlines()[-2:])
    assert 0 < float(ratio[5]) < 10
    assert added[1:7] == ["us", "per", "stage", "beside", "the", "last"]
    done = CliRunner().invoke(main, ["halves", str(bundles[name].staged), "--repeat", "1", "--tokens", "9", "--k", "auto"])
    assert done.exit_code == 0, done.output
    assert [line[:9] for line in done.stdout.splitlines()] == ["one half ", "all in on", "in halves"]


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


@over_nodes
def test_a_cluster_without_room_is_not_waited_for_longer_than_the_limit(
    bundles: Made[Bundles], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_chain, "OPENING", 1)
    opened = engines(bundles["pair"].staged)
    opened.elsewhere = RayStages(cores=2)  # a node has one
    with pytest.raises(EngineError, match=r"stage 1 .* found no place within 1 seconds") as caught:
        opened.session("target", 1)
    assert "free cores" in caught.value.hint


@over_nodes
def test_this_process_needs_room_for_the_last_stage_only(bundles: Made[Bundles], monkeypatch: pytest.MonkeyPatch) -> None:
    staged = bundles["pair"].staged
    here = open_engines(staged, *open_bundle(staged))
    half = sum(each.nbytes for each in here.session("target", 1).cache().values()) // 2
    monkeypatch.setattr(Cpu, "memory", lambda _: (half, half))
    with pytest.raises(EngineError, match="no memory"):
        here.session("target", 1)
    engines(staged).session("target", 1)


@over_nodes
def test_an_error_of_a_call_without_a_result_appears_in_the_next_pass(bundles: Made[Bundles]) -> None:
    session = engines(bundles["pair"].staged).session("target", 1)
    assert isinstance(session, StagedSession)
    session.stages[0].clear("slot")  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=r"stage 1 \(layers 0-1\) failed"):
        session.run(np.array([[5, 6, 7]]), np.array([0]))


@over_nodes
def test_another_bundle_or_release_is_refused(
    bundles: Made[Bundles], shipped_export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, bundle = tmp_path / "other", tmp_path / "bundle"
    build(shipped_export, other, stages="3", k=[1], capacity=127, batch=1)
    shutil.copytree(bundles["pair"].staged, bundle)
    opened = engines(bundle)
    with monkeypatch.context() as patch:
        patch.setattr(outrider, "__version__", "0.0.9")
        with pytest.raises(EngineError, match=r"stage 1 .*its process has outrider .*, and the one that decodes has 0\.0\.9"):
            opened.session("target", 1)
    weights = next(iter((bundle / "target").glob("*.data")))
    weights.write_bytes(bytes(weights.stat().st_size))
    with pytest.raises(EngineError, match="is not the file that was sealed"):
        opened.session("target", 1)
    shutil.rmtree(bundle)
    shutil.copytree(other, bundle)
    with pytest.raises(EngineError, match="its machine has another bundle at"):
        opened.session("target", 1)
