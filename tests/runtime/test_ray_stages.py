"""A target whose stages run on several nodes of a Ray cluster."""

from __future__ import annotations

import re
import shutil
from contextlib import closing
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import outrider
from outrider import Outrider
from outrider.backends import stage_chain
from outrider.backends.open import open_bundle, open_engines
from outrider.backends.remote_stages import RayStages
from outrider.engines.device import Cpu
from outrider.engines.staged_session import StagedSession
from outrider.errors import EngineError
from outrider.experiments.measure.__main__ import main
from outrider.tests.nodes import hosts
from outrider.tests.runtime.ray_bundles import EXPORTS, MACHINE, NODES, Bundles, engines, over, over_nodes, watched
from outrider.tests.runtime.stages import SLOTS, K, alone, at_once, results, together
from outrider.tests.support import Made, build

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]


@over(*((NODES, name) for name in EXPORTS), *((MACHINE, name) for name in ("pair", "head", "hybrid")))
def test_texts_over_nodes_are_those_of_the_whole(bundles: Made[Bundles], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and sampled, free and under grammars, alone and in halves that alternate, with every drafter of the bundle."""
    whole = Outrider.load(bundles[name].whole, slots=None)
    with closing(Outrider.load(bundles[name].staged, slots=None, stage_cores=1)) as staged:
        actors = len(staged.build.stages) - 1
        assert len(hosts(actors)) == actors
        want = alone(whole, 0, None, 8)
        assert alone(staged, 0, None, 8) == want
        assert alone(staged, "auto", None, 8) == want
        for k, drafter in product(K, whole.drafters):
            assert alone(staged, k, drafter, 8) == want, (k, drafter)
        assert together(staged, "auto") == together(whole, 0)
        under_way = watched(monkeypatch)
        for size in (0, 4, "auto"):
            assert at_once(staged, size, 8) == want, size
        assert max(under_way) == 2
        assert under_way.count(2) > len(under_way) / 6  # answers are short, and prompts are read in between


@over((NODES, "pair"), (NODES, "hybrid"), (NODES, "openvino"), (MACHINE, "pair"), (MACHINE, "hybrid"))
def test_nodes_compute_the_same_bits(bundles: Made[Bundles], name: str) -> None:
    """In every pass, and in the caches, also after copies and snapshots."""
    whole, staged = (open_engines(each, *open_bundle(each)) for each in bundles[name])
    staged.elsewhere = RayStages()
    want, got = ([*map(np.array, results(each.session("target", SLOTS)))] for each in (whole, staged))
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@over((NODES, "head"), (MACHINE, "head"))
def test_hops_and_halves_are_measured(bundles: Made[Bundles], name: str, request: pytest.FixtureRequest) -> None:
    done = CliRunner().invoke(main, ["hops", str(bundles[name].staged), "--repeat", "3", "--rows", "5"])
    assert done.exit_code == 0, done.output
    ways = ["calls"] if request.node.callspec.params["cluster"] == NODES else ["graph", "calls"]
    assert re.findall(r"^ *([\w ]+):", done.stdout, re.MULTILINE) == ["5 rows", *ways, "5 rows in one process"]
    ratio, added = (line.split() for line in done.stdout.splitlines()[-2:])
    assert 0 < float(ratio[5]) < 10
    assert added[1:7] == ["us", "per", "stage", "beside", "the", "last"]
    done = CliRunner().invoke(main, ["halves", str(bundles[name].staged), "--repeat", "1", "--tokens", "9", "--k", "auto"])
    assert done.exit_code == 0, done.output
    assert [line[:9] for line in done.stdout.splitlines()] == ["one half ", "all in on", "in halves"]


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
