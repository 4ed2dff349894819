"""A target whose stages have different backends: its drafted texts are its plain ones, alone and together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from outrider.backends.onnxruntime.engine import OnnxRuntimeEngines
from outrider.backends.open import open_bundle, open_engines
from outrider.engines.staged_session import StagedSession
from outrider.runtime.generation import Outrider
from outrider.tests.deferred import deferred
from outrider.tests.runtime.local_stages import LocalStages
from outrider.tests.runtime.stages import CAPACITY, CHUNK, SLOTS, K, alone, at_once, loaded, results, together
from outrider.tests.support import Made, build

ORT, OV = "onnxruntime", "openvino"


class Mix(NamedTuple):
    """A target, where it is cut, and the backend of each stage."""

    export: str
    stages: str
    backends: tuple[str, ...]
    exact: bool = False  # whether the whole target has the same texts, on the backend of the first stage


MIXES = {
    "head": Mix("fp32 trained head", "2", (ORT, OV), exact=True),
    "three": Mix("shipped", "0-1,2-4,5", (OV, ORT, OV), exact=True),
    "fp16": Mix("fp16 pair", "2", (OV, ORT)),
    "fp16, the other way": Mix("fp16 pair", "2", (ORT, OV)),
    "int4": Mix("int4 random head", "2", (OV, ORT)),
    "int4, the other way": Mix("int4 random head", "2", (ORT, OV)),
    "recurrent layers where they run": Mix("fp32 hybrid", "0-2,3", (ORT, OV), exact=True),
}
QUICK = ("head",)


@pytest.fixture(scope="module")
def made(named_exports: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Made[Outrider]:
    folder = tmp_path_factory.mktemp("mixed")

    def make(name: str) -> Outrider:
        mix, whole = MIXES[name.removesuffix(" whole")], name.endswith(" whole")
        source = named_exports(mix.export)
        if whole:
            return loaded(source, folder / name, None, backend=mix.backends[0])
        return loaded(source, folder / name, mix.stages, stage_backends=mix.backends)

    return Made(make)


@pytest.fixture(params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MIXES])
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def test_texts_of_mixed_stages_are_their_plain_ones(made: Made[Outrider], name: str) -> None:
    """Greedy and sampled, free and under grammars, with each drafter of the bundle, and with requests that come and go."""
    staged, mix = made[name], MIXES[name]
    own = staged.build.backend
    assert [stage.backend.name if stage.backend else own for stage in staged.build.stages] == [*mix.backends]
    want = alone(staged, 0, None, 12)
    for drafter in staged.drafters:
        assert alone(staged, 4, drafter, 12) == want, drafter
    assert alone(staged, "auto", None, 12) == want
    assert together(staged, "auto") == together(staged, 0)
    if mix.exact:
        assert alone(made[f"{name} whole"], 0, None, 12) == want


def test_each_backend_computes_its_stages_in_actors_too(made: Made[Outrider], name: str) -> None:
    """The same bits, also after copies; and the same texts in halves of a batch."""
    staged = made[name]
    folder = staged.engines.folder
    engines = open_engines(folder, *open_bundle(folder))
    engines.elsewhere = LocalStages()
    got, want = ([*map(np.array, results(each.session("target", SLOTS)))] for each in (engines, staged.engines))
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert at_once(Outrider(engines, staged.text, SLOTS), 4, 12) == alone(staged, 0, None, 12)


def test_a_gpu_takes_the_last_layers_and_another_backend_the_first(
    drafter_exports: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """The GPU only behaves as one does; the bundle is built without it."""
    sizes = {"k": [*K], "capacity": CAPACITY, "batch": SLOTS, "max_prompt_chunk": CHUNK}
    places = {"stages": "2", "stage_backends": (OV, ORT), "stage_devices": ("cpu", "cuda:0")}
    staged = deferred(build(drafter_exports("fp32", "trained head"), tmp_path / "bundle", **places, **sizes), slots=SLOTS)
    assert staged.build.homes == ["openvino cpu", "cuda:0"]
    want = alone(staged, 0, None, 12)
    for drafter in staged.drafters:
        assert alone(staged, 4, drafter, 12) == want, drafter
    assert together(staged, "auto") == together(staged, 0)


def test_a_backend_that_needs_pairs_of_rows_gets_them_in_any_stage(
    made: Made[Outrider], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a row of its stage would have other bits alone than beside drafted ones."""
    engines, paired = made[QUICK[0]].engines, list[StagedSession]()
    monkeypatch.setattr(OnnxRuntimeEngines, "pairs_lone_rows", lambda *_: True)
    monkeypatch.setattr(StagedSession, "pair_lone_rows", lambda session: paired.append(session))
    session = engines.session("target", 1)
    assert paired == [session]
