"""A target in stages gives the tokens of the whole one: alone and together, greedy and sampled, with every kind of draft."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import outrider
from outrider.backends.open import open_bundle, open_engines
from outrider.backends.stage_host import StageHost, seal
from outrider.errors import EngineError
from outrider.runtime.generation import Outrider
from outrider.tests.deferred import deferred
from outrider.tests.runtime.local_stages import LocalStages
from outrider.tests.runtime.stages import SLOTS, alone, at_once, loaded, results, together
from outrider.tests.support import Made


class Cut(NamedTuple):
    """A target, and where it is cut."""

    export: str
    stages: str
    backend: str = "onnxruntime"


CUTS = {
    "head": Cut("fp32 trained head", "2"),
    "hybrid": Cut("fp32 hybrid", "0-1,2-3"),
    "six layers in three": Cut("shipped", "0,1-3,4-5"),
    "hybrid in three": Cut("fp32 hybrid", "3"),
    "hybrid in four, int4": Cut("int4 hybrid", "4"),
    "block": Cut("fp32 random block", "2"),
    "parallel head": Cut("fp32 random parallel-head", "2"),
    "parallel draft": Cut("fp32 trained parallel", "2"),
    "int4": Cut("int4 random head", "2"),
    "openvino": Cut("fp32 trained head", "2", "openvino"),
    "openvino in three": Cut("shipped", "3", "openvino"),
    "openvino, int4": Cut("int4 random head", "2", "openvino"),
    "openvino, fp16": Cut("fp16 pair", "2", "openvino"),
}
QUICK = ("head",)
Pair = tuple[Outrider, Outrider]


@pytest.fixture(scope="module")
def pairs(named_exports: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Made[Pair]:
    """Each target in one piece and in stages."""
    folder = tmp_path_factory.mktemp("stages")

    def make(name: str) -> Pair:
        export, stages, backend = CUTS[name]
        source = named_exports(export)
        return (
            loaded(source, folder / f"{name} whole", None, backend=backend),
            loaded(source, folder / f"{name} staged", stages, backend=backend),
        )

    return Made(make)


@pytest.fixture(params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CUTS])
def pair(request: pytest.FixtureRequest, pairs: Made[Pair]) -> Pair:
    return pairs[request.param]


def test_stages_compute_the_same_bits(pair: Pair) -> None:
    """In every pass, and in the caches, also after copies and snapshots."""
    whole, staged = pair
    assert len(staged.build.stages) > 1
    got, want = ([*map(np.array, results(each.engines.session("target", SLOTS)))] for each in (staged, whole))
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", ["head", "hybrid in three"])
def test_what_runs_in_actors_computes_the_same_bits(pairs: Made[Pair], name: str) -> None:
    """Here without actors; with them in test_ray_stages.py, which is slow."""
    whole, staged = (each.engines.folder for each in pairs[name])
    actors = open_engines(staged, *open_bundle(staged))
    actors.elsewhere = LocalStages()
    single = open_engines(whole, *open_bundle(whole))
    got, want = ([*map(np.array, results(each.session("target", SLOTS)))] for each in (actors, single))
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_stages_that_replace_lost_ones_are_as_those_were(pairs: Made[Pair]) -> None:
    staged, stages = pairs["head"][1].engines.folder, LocalStages()
    actors = open_engines(staged, *open_bundle(staged))
    actors.elsewhere = stages
    session = actors.session("target", SLOTS)
    session.pair_lone_rows()
    session.reopen()
    assert [each.calls for each in stages.chains] == [[("pair_lone_rows", ())]] * 2


def test_an_actor_refuses_another_bundle_and_another_release(pairs: Made[Pair]) -> None:
    whole, staged = (each.engines for each in pairs["head"])
    host, own = StageHost("stage 1"), outrider.__version__
    with pytest.raises(EngineError, match=r"^stage 1: its machine has another bundle at "):
        host.open(0, staged.folder, seal(whole.manifest), own, 1, None)
    with pytest.raises(EngineError, match=r"^stage 1: its process has outrider .*, and the one that decodes has 0\.0\.9"):
        host.open(0, staged.folder, seal(staged.manifest), "0.0.9", 1, None)


@pytest.mark.parametrize("k", [0, 4, "auto", pytest.param(1, marks=pytest.mark.slow)])
def test_texts_of_stages_are_those_of_the_whole(pair: Pair, k: int | str) -> None:
    """Greedy and sampled, free and under grammars, with each drafter of the bundle."""
    whole, staged = pair
    assert staged.drafters == whole.drafters
    want = alone(whole, 0, None, 24)
    for drafter in whole.drafters if k == 4 else [None]:
        assert alone(staged, k, drafter, 24) == want, drafter


@pytest.mark.parametrize("k", ["auto", pytest.param(4, marks=pytest.mark.slow)])
def test_requests_share_the_slots_of_all_stages(pair: Pair, k: int | str) -> None:
    """With prefixes that are copied, kept and cut off, and requests that are cancelled."""
    whole, staged = pair
    assert together(staged, k) == together(whole, 0)


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("name", ["head", "hybrid in three"])
def test_texts_of_halves_that_alternate_are_those_of_the_whole(pairs: Made[Pair], name: str, late: bool) -> None:
    """Whether the other processes run a pass as soon as they have it, or when this one waits for it: greedy and sampled, free
    and under grammars, and with requests that come and go."""
    whole, staged = pairs[name]
    engines, stages = open_engines(staged.engines.folder, *open_bundle(staged.engines.folder)), LocalStages(late)
    engines.elsewhere = stages
    halves = Outrider(engines, staged.text, SLOTS)
    want, (chain,) = alone(whole, 0, None, 12), stages.chains
    assert alone(halves, 4, None, 12) == want
    assert chain.overlapping == 0  # of one sequence nothing is done ahead
    for k in (0, 4, "auto"):
        passes = chain.passes
        assert at_once(halves, k, 12) == want, k
        assert chain.overlapping > (chain.passes - passes) / 4  # answers are short, and prompts are read in between
        chain.overlapping = 0
    assert together(halves, "auto") == together(whole, 0)
    assert chain.overlapping


def test_stages_wait_for_each_other_on_a_device_that_runs_behind(pairs: Made[Pair]) -> None:
    whole, staged = pairs[QUICK[0]]
    behind = deferred(staged.engines.folder, slots=SLOTS)
    assert alone(behind, 4, None, 12) == alone(whole, 0, None, 12)
    assert behind.engines.device.replayed  # type: ignore[attr-defined]  # rounds are recorded over both stages


def test_a_head_reads_the_features_of_the_stage_that_has_them(pairs: Made[Pair]) -> None:
    whole, staged = pairs[QUICK[0]]
    assert alone(staged, 4, "head", 24) == alone(whole, 4, "head", 24)
    accepted = []
    for each in (whole, staged):
        *_, last = each.generate("Once upon a time", k=4, drafter="head")
        accepted.append(last.stats.accepted)
    assert accepted[0] == accepted[1] > 0


@pytest.mark.slow
def test_rounded_halves_are_near_those_of_the_whole(trained_exports: Callable[[str], Path], tmp_path: Path) -> None:
    """ONNX Runtime adds and normalizes fp16 in fp32 before it rounds the sum; a stage begins with the rounded sum."""
    cuts = {"whole": None, "staged": "2"}
    made = [loaded(trained_exports("fp16"), tmp_path / name, stages) for name, stages in cuts.items()]
    sessions = [each.engines.session("target", SLOTS) for each in made]
    want, got = (results(each) for each in sessions)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours.astype(np.float32), theirs.astype(np.float32), atol=0.02, rtol=0.02)
