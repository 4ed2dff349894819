"""What the TensorRT runtime decides before it touches a GPU: what it refuses, and which weights stay on the GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from outrider.backends.open import open_bundle, open_engines
from outrider.backends.tensorrt.engine import silent_logger
from outrider.backends.tensorrt.engines import check_gpu, check_validity, check_version, reserved, weight_budgets
from outrider.backends.tensorrt.package import RTX, RTX_GPUS, TENSORRT, plan_file
from outrider.bundle.folder import read_manifest
from outrider.bundle.manifest import Build
from outrider.errors import DeviceError, EngineError, UsageError
from outrider.export.pair import export_pair
from outrider.tests.support import build, reseal, run_here

pytest.importorskip("tensorrt_rtx", reason="would show what a TensorRT-RTX bundle is refused for: pip install 'outrider[rtx]'")


@pytest.fixture(scope="module")
def bundle(rtx_bundle: Path) -> Path:
    return rtx_bundle


@pytest.fixture
def made(bundle: Path) -> Build:
    build = read_manifest(bundle).build
    assert build is not None
    return build


@pytest.mark.parametrize("command", [["generate", "--prompt", "the"], ["verify"]])
def test_a_bundle_is_refused_without_a_gpu(bundle: Path, command: list[str]) -> None:
    name, *rest = command
    done = run_here(name, bundle, *rest)
    assert done.returncode == 1
    assert "error: no NVIDIA GPU found: there is no driver\n" in done.stderr
    assert "hint:  run it on a machine with an NVIDIA GPU and driver; for a CPU, build with" in done.stderr
    assert "Traceback" not in done.stderr


def test_it_was_not_measured_and_says_so(bundle: Path, made: Build) -> None:
    assert made.costs == {}
    done = run_here("inspect", bundle)
    assert done.returncode == 0
    assert "tensorrt-rtx" in done.stdout


def test_a_bundle_without_a_draft_needs_no_plan_of_one(bundle: Path, tmp_path: Path) -> None:
    """Of that with one, what drafts is taken away."""
    alone = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    whole = read_manifest(alone)
    target = {"target": whole.models["target"]}
    needed = msgspec.structs.replace(whole, models=target).engines
    for name in set(whole.engines) - set(needed):
        (alone / plan_file(name)).unlink()
    reseal(alone, models=target)
    check_alone(alone)


@pytest.mark.slow
def test_a_bundle_without_a_draft_has_every_plan_that_is_loaded(checkpoints: Path, tmp_path: Path) -> None:
    export_pair(str(checkpoints / "target"), None, tmp_path / "onnx", precision="fp32")
    check_alone(build(tmp_path / "onnx", tmp_path / "bundle", backend="tensorrt-rtx", k=[1], options={"optimization_level": 0}))


def check_alone(alone: Path) -> None:
    """Neither the draft's plan nor the drafters' are in it, and none of them may be asked for."""
    manifest, _ = open_bundle(alone)
    assert set(manifest.engines) == {"target", "verifier", "greedy_verifier", "logprobs"}
    assert {alone / plan_file(name) for name in manifest.engines} == set(alone.rglob("*.plan"))
    done = run_here("generate", alone, "--prompt", "the")
    assert "error: no NVIDIA GPU found" in done.stderr


def test_a_plan_is_not_valid_without_a_gpu(bundle: Path, made: Build) -> None:
    trt = RTX.load()
    runtime = trt.Runtime(silent_logger(trt))
    for path in [bundle / plan_file(name) for name in read_manifest(bundle).engines]:
        with pytest.raises(DeviceError, match="does not run here"):
            check_validity(trt, runtime, path, np.memmap(path, dtype=np.uint8, mode="r"), "build it again")


class Diagnosed:
    """A runtime with a diagnosis of its own: a machine on which TensorRT-RTX gives it is not at hand."""

    def __init__(self, trt: Any, *flags: str):
        members = trt.EngineInvalidityDiagnostics.__members__
        self._answer = trt.EngineValidity.INVALID, sum(int(members[flag]) for flag in flags)

    def get_engine_validity(self, data: object) -> tuple[Any, int]:
        return self._answer


@pytest.mark.parametrize(
    ("flags", "error", "message"),
    [
        (("UNSUPPORTED_CC",), DeviceError, "does not run here: it is for GPUs of other compute capabilities"),
        (("OLD_CUDA_DRIVER", "INSUFFICIENT_GPU_MEMORY"), DeviceError, "driver is too old, the GPU has too little free memory"),
        (("MALFORMED_ENGINE",), EngineError, "is not valid: the plan is truncated or corrupt"),
        (("UNSUPPORTED_CC", "VERSION_MISMATCH"), EngineError, "is not valid: it is from another release of the package"),
    ],
)
def test_a_defective_plan_is_distinguished_from_a_machine_that_cannot_run_it(
    flags: tuple[str, ...], error: type[EngineError], message: str
) -> None:
    trt = RTX.load()
    with pytest.raises(EngineError, match=message) as refused:
        check_validity(trt, Diagnosed(trt, *flags), Path("model.plan"), b"", "build it again")
    assert type(refused.value) is error
    assert ("--backend onnxruntime" in refused.value.hint) == (flags == ("UNSUPPORTED_CC",))


def test_it_does_not_run_on_a_cpu(bundle: Path) -> None:
    done = run_here("generate", bundle, "--prompt", "the", "--device", "cpu")
    assert done.returncode == 2
    assert "tensorrt-rtx does not run on a CPU" in done.stderr


def test_another_gpu_is_refused_with_the_command_as_a_hint(made: Build) -> None:
    check_gpu(RTX, made, "NVIDIA GeForce RTX 4090", "8.9")
    with pytest.raises(EngineError, match=r"compute capability 12\.0, 8\.9; this one, NVIDIA A100, has 8\.0") as refused:
        check_gpu(RTX, made, "NVIDIA A100", "8.0")
    assert "outrider build-engine" in refused.value.hint
    assert "--backend tensorrt-rtx" in refused.value.hint
    check_gpu(RTX, msgspec.structs.replace(made, compute_capabilities=[]), "NVIDIA A100", "8.0")  # the plan itself must know


@pytest.mark.parametrize(
    ("capability", "runs"), [("7.5", True), ("12.1", True), ("12.3", True), ("9.0", False), ("10.0", False)]
)
def test_a_gpu_that_the_package_does_not_run_on_gets_the_backends_that_do(made: Build, capability: str, runs: bool) -> None:
    anywhere = msgspec.structs.replace(made, compute_capabilities=[])
    if runs:
        check_gpu(RTX, anywhere, "a GPU", capability)
        return
    with pytest.raises(DeviceError, match=re.escape(f"it runs on {RTX_GPUS}")) as refused:
        check_gpu(RTX, anywhere, "a GPU", capability)
    assert "--backend onnxruntime --device cuda" in refused.value.hint
    assert "build-engine" not in refused.value.hint


def test_another_gpu_of_the_same_capability_is_refused_if_kernels_were_chosen_for_one(made: Build) -> None:
    on_one = msgspec.structs.replace(made, backend="tensorrt", device="NVIDIA H100 PCIe", compute_capabilities=["9.0"])
    check_gpu(TENSORRT, on_one, "NVIDIA H100 PCIe", "9.0")
    with pytest.raises(EngineError, match="built on a NVIDIA H100 PCIe; this is a NVIDIA H200"):
        check_gpu(TENSORRT, on_one, "NVIDIA H200", "9.0")


def test_another_release_is_refused_before_a_plan_is_read(bundle: Path, made: Build) -> None:
    older = msgspec.structs.replace(made, backend_version="1.0.0.1")
    with pytest.raises(EngineError, match=r"built by tensorrt_rtx 1\.0\.0\.1; installed is") as refused:
        open_engines(bundle, read_manifest(bundle), older)
    assert "pip install tensorrt_rtx==1.0.0.1, or build it again" in refused.value.hint
    check_version(RTX, msgspec.structs.replace(older, version_compatible=True), "1.7.1")


def test_a_missing_package_is_named_with_its_extra(bundle: Path, made: Build) -> None:
    with pytest.raises(EngineError, match="tensorrt cannot be imported") as refused:
        open_engines(bundle, read_manifest(bundle), msgspec.structs.replace(made, backend="tensorrt"))
    assert refused.value.hint == "pip install 'outrider[tensorrt]'"


def test_a_missing_cuda_package_is_named(tiny_export: Path, tmp_path: Path) -> None:
    code = "import sys; sys.modules['cuda'] = None\nfrom outrider.cli import main; main()"
    arguments = ["build-engine", str(tiny_export), "-o", str(tmp_path / "bundle"), "--device", "cuda"]
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "cuda-bindings cannot be imported" in done.stderr
    assert "pip install 'outrider[cuda]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_onnx_runtime_on_cuda_is_refused_without_a_gpu(tiny_bundle: Path, tiny_export: Path, tmp_path: Path) -> None:
    manifest = read_manifest(tiny_bundle)
    assert manifest.build is not None
    exported = msgspec.structs.replace(manifest.build, rewrites={})
    with pytest.raises(EngineError, match="no NVIDIA GPU found"):
        open_engines(tiny_bundle, manifest, exported, "cuda")
    done = run_here("build-engine", tiny_export, "-o", tmp_path / "bundle", "--device", "cuda")
    assert (done.returncode, "error: no NVIDIA GPU found" in done.stderr) == (1, True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", [("generate", "--prompt", "x"), ("calibrate",)])
def test_graphs_that_are_fused_for_the_cpu_run_there_only(tiny_bundle: Path, command: tuple[str, ...]) -> None:
    done = run_here(command[0], tiny_bundle, *command[1:], "--device", "cuda")
    assert (done.returncode, "fused for the CPU" in done.stderr) == (2, True)


def test_the_device_option_is_only_for_onnx_runtime(tiny_export: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--device does not apply to the backend tensorrt-rtx"):
        build(tiny_export, tmp_path / "bundle", backend="tensorrt-rtx", device="cuda")


GIB = 2**30


@pytest.mark.parametrize(
    ("streamable", "available", "budgets"),
    [
        ([3 * GIB], 5 * GIB, [3 * GIB]),
        ([40 * GIB, 6 * GIB], 20 * GIB, [20 * GIB, 0]),
        ([40 * GIB, 6 * GIB], 42 * GIB, [40 * GIB, 2 * GIB]),
        ([GIB], -GIB, [0]),
    ],
)
def test_as_many_streamed_weights_stay_on_the_gpu_as_fit(streamable: list[int], available: int, budgets: list[int]) -> None:
    assert weight_budgets(streamable, available) == budgets


def test_the_caches_have_room_beside_streamed_weights(bundle: Path, made: Build) -> None:
    manifest = read_manifest(bundle)
    caches = sum(
        2 * 4 * heads * width * made.capacity for model in manifest.models.values() for heads, width, _ in model.layers
    )
    logits = 4 * manifest.vocab_rows * (2 * (made.k[-1] + 1) + made.max_prompt_chunk)
    assert reserved(manifest, made) == made.batch * (caches + logits)
    larger = msgspec.structs.replace(made, batch=2**20)
    assert reserved(manifest, larger) == 2**20 * (caches + logits) > 2**32
