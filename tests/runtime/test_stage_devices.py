"""Stages on several devices of one process, which here only behave as GPUs do: the tokens are those of one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from outrider.backends.base import Backend, Engines
from outrider.backends.onnxruntime.backend import OnnxRuntimeBackend
from outrider.bundle.manifest import Build, Manifest
from outrider.engines.device import Cpu
from outrider.engines.staged_session import StagedSession
from outrider.errors import EngineError, UsageError
from outrider.runtime.generation import Outrider
from outrider.tests.deferred import Deferred, deferred, opened
from outrider.tests.runtime.local_stages import LocalStages
from outrider.tests.runtime.stages import CAPACITY, CHUNK, SLOTS, K, alone, results, together
from outrider.tests.support import Made, build

SIZES = {"k": [*K], "capacity": CAPACITY, "batch": SLOTS, "max_prompt_chunk": CHUNK}


class Places(NamedTuple):
    """A target, where it is cut, and the devices of its stages."""

    export: str
    stages: str
    devices: tuple[str, ...]


PLACES = {
    "two GPUs": Places("fp32 trained head", "2", ("cuda:0", "cuda:1")),
    "there and back": Places("shipped", "0,1-3,4-5", ("cuda:1", "cuda:0", "cuda:1")),
    "three GPUs": Places("shipped", "3", ("cuda:0", "cuda:1", "cuda:2")),
    "the rest on the CPU": Places("fp32 trained head", "2", ("cpu", "cuda:0")),
    "the end on the CPU": Places("shipped", "2", ("cuda:0", "cpu")),
}
QUICK = ("two GPUs", "the rest on the CPU")
Both = tuple[Outrider, Outrider]


@pytest.fixture(scope="module")
def loaded(named_exports: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Made[Both]:
    """Each target on one device in one piece, and on several in stages."""
    folder = tmp_path_factory.mktemp("devices")

    def make(name: str) -> Both:
        export, stages, devices = PLACES[name]
        source = named_exports(export)
        whole = build(source, folder / f"{name} whole", device="cuda", **SIZES)
        staged = build(source, folder / f"{name} staged", stages=stages, stage_devices=devices, **SIZES)
        return deferred(whole, slots=SLOTS), deferred(staged, slots=SLOTS)

    return Made(make)


@pytest.fixture(params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PLACES])
def both(request: pytest.FixtureRequest, loaded: Made[Both]) -> Both:
    return loaded[request.param]


def staged_devices(outrider: Outrider) -> list[str | None]:
    return [stage.device for stage in outrider.build.stages]


def test_devices_compute_the_same_bits(both: Both) -> None:
    """In every pass, and in the caches, also after copies and snapshots."""
    whole, staged = both
    session = staged.engines.session("target", SLOTS)
    assert isinstance(session, StagedSession)
    assert len({stage.device.stream for stage in session.stages}) == len({*staged_devices(staged)}) > 1
    got, want = ([*map(np.array, results(each))] for each in (session, whole.engines.session("target", SLOTS)))
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_texts_of_several_devices_are_those_of_one(both: Both) -> None:
    """Greedy and sampled, free and under grammars, alone and together, with each drafter of the bundle."""
    whole, staged = both
    want = alone(whole, 0, None, 16)
    for drafter in staged.drafters:
        assert alone(staged, 4, drafter, 16) == want, drafter
    assert alone(staged, "auto", None, 16) == want
    assert together(staged, "auto") == together(whole, 0)


@pytest.mark.slow
def test_recurrent_layers_on_several_devices(named_exports: Callable[[str], Path], tmp_path: Path) -> None:
    """With n-grams as drafts, of which many are rejected; and a prefix that is read from a snapshot."""
    export = named_exports("fp32 hybrid")
    one = {**SIZES, "batch": 1}
    whole = deferred(build(export, tmp_path / "whole", device="cuda", **one))
    staged = deferred(build(export, tmp_path / "staged", stages="0-1,2-3", stage_devices=("cuda:0", "cuda:1"), **one))
    want = alone(whole, 0, None, 16)
    for k in (0, 4, "auto"):
        assert alone(staged, k, None, 16) == want
    assert together(staged, 4) == together(whole, 0)


def test_the_drafts_are_beside_the_last_stage(loaded: Made[Both]) -> None:
    staged = loaded[QUICK[0]][1]
    assert {session.device for session in staged.sessions.values()} == {staged.engines.device}
    target = staged.sessions["target"]
    assert isinstance(target, StagedSession)
    assert target.stages[-1].device is staged.engines.device is not target.stages[0].device


def test_rounds_of_several_gpus_are_one_recording(loaded: Made[Both]) -> None:
    """Which replays copies between them, too; with a stage on the CPU there is none."""
    for name in QUICK:
        staged = loaded[name][1]
        assert alone(staged, 4, "head", 16)
        first, last = (staged.engines.others[each or ""].device for each in (*staged_devices(staged),))
        assert isinstance(last, Deferred)
        gpus = isinstance(first, Deferred)
        assert bool(staged.rounds.recorder.recorded) == bool(last.replayed) == gpus
        assert not isinstance(first, Deferred) or first.recorded == 0


@pytest.mark.parametrize(
    ("name", "others"),
    [(QUICK[0], ["cuda"]), pytest.param("three GPUs", ["cuda", "cuda"], marks=pytest.mark.slow)]
    + [pytest.param(name, [PLACES[name].devices[0].partition(":")[0]], marks=pytest.mark.slow) for name in list(PLACES)[-2:]],
)
def test_stages_in_other_processes_have_a_gpu_each(
    loaded: Made[Both], name: str, others: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here without processes; with them in test_ray_gpus.py, which is slow. What crosses is copied through the host."""
    whole, staged = loaded[name]
    asked = list[str | None]()

    def noted(backend: Backend, folder: Path, manifest: Manifest, build: Build, device: str | None) -> Engines:
        asked.append(device)
        return opened(backend, folder, manifest, build, device)

    monkeypatch.setattr(OnnxRuntimeBackend, "open", noted)
    monkeypatch.setattr("outrider.backends.remote_stages.RayStages", lambda *_: LocalStages())
    actors = Outrider.load(staged.engines.folder, slots=None, stage_cores=1)
    assert asked == [PLACES[name].devices[-1], *others]
    for k in (0, 4, "auto"):
        assert alone(actors, k, None, 12) == alone(whole, 0, None, 12)
    assert together(actors, "auto") == together(whole, 0)


def test_a_target_in_one_piece_has_no_stages_for_other_processes(loaded: Made[Both]) -> None:
    with pytest.raises(UsageError, match="in one piece"):
        Outrider.load(loaded[QUICK[0]][0].engines.folder, stage_cores=1)


@pytest.mark.parametrize("cores", [0, -1, 1.5, "x"])
def test_stages_need_whole_cores(loaded: Made[Both], cores: Any) -> None:
    with pytest.raises(UsageError, match="stage_cores is"):
        Outrider.load(loaded[QUICK[0]][1].engines.folder, stage_cores=cores)


def test_each_device_needs_memory_for_its_own_stages_only(loaded: Made[Both], monkeypatch: pytest.MonkeyPatch) -> None:
    whole, staged = loaded[QUICK[0]]
    layers = whole.manifest.models["target"].layers
    size = SLOTS * CAPACITY * sum(heads * (key + value) for heads, key, value in layers) * 4
    width = whole.manifest.models["target"].features
    assert width is not None
    features = SLOTS * CAPACITY * width * 4
    most = size // 2 + features + 100_000  # and what stages pass on
    assert most < size + features
    monkeypatch.setattr(Cpu, "memory", lambda _: (most, most))
    staged.engines.session("target", SLOTS)
    one = deferred(staged.engines.folder)
    one.engines.others = {}
    with pytest.raises(EngineError, match=r"no memory for a cache of 3 x 191 positions: it takes [\d,]+ bytes, and there are"):
        one.engines.session("target", SLOTS)
