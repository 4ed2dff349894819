"""The stages in a manifest: they must have every layer and every cache once, and fit together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from outrider.backends import registry
from outrider.bundle.decoding import decode_manifest
from outrider.bundle.folder import read_manifest
from outrider.bundle.manifest import Manifest
from outrider.engines.contract import INPUT_IDS, PAST_FEATURES, Stage, Tensor
from outrider.errors import FolderError
from outrider.tests.support import sealed_bundle

PASSED = Tensor("boundary.0.0", "float32", ("batch", "rows", 8))
FIRST = Stage((0, 0), 100, [INPUT_IDS, "past_key_0", "past_value_0"], [], [PASSED])
SECOND = Stage((1, 1), 100, [INPUT_IDS, "past_key_1", "past_value_1"], [PASSED], [])


def passing(tensor: Tensor) -> list[Stage]:
    """The two stages with another tensor between them."""
    return [replace(FIRST, gives=[tensor]), replace(SECOND, takes=[tensor])]


def decode(folder: Path, *stages: Any) -> Manifest:
    """A manifest with two layers in these stages, written and read again."""
    sealed = read_manifest(sealed_bundle(folder))
    assert sealed.build is not None
    models = sealed.models | {"target": msgspec.structs.replace(sealed.models["target"], layers=[(2, 8, 8)] * 2)}
    build = msgspec.structs.replace(sealed.build, stages=[*stages])
    return decode_manifest(msgspec.structs.replace(sealed, models=models, build=build).encode())


def test_stages_read_back_as_they_were_written(tmp_path: Path) -> None:
    build = decode(tmp_path, FIRST, SECOND).build
    assert build is not None
    assert build.stages == [FIRST, SECOND]
    assert [*build.files("target")] == ["target/layers-0-0.onnx", "target/layers-1-1.onnx"]
    assert [*build.files("draft")] == ["draft/model.onnx"]


@pytest.mark.parametrize(
    "stages",
    [
        [FIRST],
        [SECOND],
        [SECOND, FIRST],
        [FIRST, SECOND, SECOND],
        [FIRST, replace(SECOND, layers=(2, 2))],
        [FIRST, replace(SECOND, layers=(1, 0))],
        [FIRST, replace(SECOND, takes=[])],
        [FIRST, replace(SECOND, inputs=FIRST.inputs)],
        passing(replace(PASSED, dtype="text")),
        passing(replace(PASSED, shape=("batch", "rows", -8))),
        passing(replace(PASSED, shape=("batch", "many", 8))),
    ],
)
def test_stages_that_do_not_fit_together_are_damage(tmp_path: Path, stages: list[Stage]) -> None:
    with pytest.raises(FolderError, match="its stages do not fit together"):
        decode(tmp_path, *stages)


@pytest.mark.parametrize("place", ["stage", "tensor"])
def test_a_field_that_nobody_knows_is_damage(tmp_path: Path, place: str) -> None:
    """It may change what the others mean."""
    written = json.loads(decode(tmp_path, FIRST, SECOND).encode())
    stage = written["build"]["stages"][0]
    (stage if place == "stage" else stage["gives"][0])["more"] = 1
    with pytest.raises(FolderError, match="unknown field `more`"):
        decode_manifest(json.dumps(written).encode())


def test_features_in_another_stage_than_the_last_are_damage(tmp_path: Path) -> None:
    """A draft head runs beside the last one."""
    sealed = decode(tmp_path, FIRST, SECOND)
    assert sealed.build is not None
    models = {role: replace(sealed.models["target"], features=8) for role in ("target", "head")}
    first, second = (replace(stage, inputs=[*stage.inputs, PAST_FEATURES]) for stage in (FIRST, SECOND))
    right, wrong = (
        replace(sealed, models=models, build=replace(sealed.build, stages=stages)).encode()
        for stages in ([FIRST, second], [first, SECOND])
    )
    decode_manifest(right)
    with pytest.raises(FolderError, match="its stages do not fit together"):
        decode_manifest(wrong)


def test_stages_of_a_backend_that_runs_none_are_damage(tmp_path: Path) -> None:
    manifest = decode(tmp_path, FIRST, SECOND)
    assert manifest.build is not None
    with pytest.raises(FolderError, match="it has stages, and tensorrt-rtx runs none"):
        registry.get("tensorrt-rtx").check(manifest, manifest.build)
