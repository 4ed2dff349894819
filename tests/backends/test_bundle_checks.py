"""What a backend requires of a manifest: files, costs and profiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.backends import registry
from outrider.backends.tensorrt.package import plan_file
from outrider.backends.tensorrt.profiles import sampler_profiles, step_profiles
from outrider.bundle.decoding import decode_manifest
from outrider.bundle.manifest import MANIFEST
from outrider.engines.samplers import SAMPLERS
from outrider.errors import FolderError

ROLES = ("target", "draft")  # of the tiny pair
ENGINES = (*ROLES, *SAMPLERS)


@pytest.fixture
def data(tiny_bundle: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((tiny_bundle / MANIFEST).read_text())
    return loaded


@pytest.fixture
def tensorrt(data: dict[str, Any]) -> dict[str, Any]:
    """The manifest of a TensorRT bundle, as `build-engine` writes it where there is no GPU."""
    build = data["build"]
    sizes = build["k"], build["batch"]
    steps = step_profiles(build["k"], build["capacity"], build["batch"], build["max_prompt_chunk"])
    samplers = {name: sampler_profiles(name, *sizes, 320) for name in SAMPLERS}
    build |= {"backend": "tensorrt-rtx", "costs": {}, "profiles": {**dict.fromkeys(ROLES, steps), **samplers}}
    data["files"] = {name: {"sha256": "", "size": 1} for name in ("tokenizer.json", *map(plan_file, ENGINES))}
    return json.loads(json.dumps(data))  # type: ignore[no-any-return]


def check(data: dict[str, Any]) -> None:
    """The checks of a manifest when a bundle is opened."""
    manifest = decode_manifest(json.dumps(data).encode())
    assert manifest.build is not None
    registry.get(manifest.build.backend).check(manifest, manifest.build)


def test_graphs_that_are_not_listed_are_damage(data: dict[str, Any]) -> None:
    check(data)
    del data["files"]["draft/model.onnx.data"]
    with pytest.raises(FolderError, match=r"manifest\.json is damaged: it does not list draft/model\.onnx\.data"):
        check(data)


def test_a_k_that_was_not_built_cannot_be_written_in(data: dict[str, Any]) -> None:
    data["build"]["k"] = [1, 2, 3, 4, 8]
    with pytest.raises(FolderError, match="costs of the target are missing"):
        check(data)


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt"])
def test_costs_are_required_if_engines_run_where_they_are_built(tensorrt: dict[str, Any], backend: str) -> None:
    tensorrt["build"]["backend"] = backend
    if backend == "onnxruntime":
        tensorrt["files"] |= {f"{role}/model.onnx{end}": {"sha256": "", "size": 1} for role in ROLES for end in ("", ".data")}
        tensorrt["files"] |= {f"sampler/{name}.onnx": {"sha256": "", "size": 1} for name in SAMPLERS}
    with pytest.raises(FolderError, match="costs of the target are missing"):
        check(tensorrt)


def test_tensorrt_plans_stand_in_for_graphs_and_costs_may_come_later(tensorrt: dict[str, Any]) -> None:
    check(tensorrt)
    del tensorrt["files"]["sampler/verifier.plan"]
    with pytest.raises(FolderError, match=r"does not list sampler/verifier\.plan"):
        check(tensorrt)


@pytest.mark.parametrize("engine", ENGINES)
def test_missing_profiles_are_damage(tensorrt: dict[str, Any], engine: str) -> None:
    profiles: list[dict[str, Any]] = tensorrt["build"]["profiles"][engine]
    tensor = "input_ids" if engine in ROLES else "logits"
    no_rows = [profile | {tensor: [[1]] * 3} for profile in profiles]
    damaged: list[list[dict[str, Any]]] = [[], [{}], profiles[1:], no_rows]
    for broken in damaged:
        tensorrt["build"]["profiles"][engine] = broken
        with pytest.raises(FolderError, match=f"profiles of the {engine} are missing"):
            check(tensorrt)


def test_costs_that_were_measured_are_of_every_k(tensorrt: dict[str, Any]) -> None:
    tensorrt["build"]["costs"] = {"target": []}
    with pytest.raises(FolderError, match="costs of the target are missing"):
        check(tensorrt)
