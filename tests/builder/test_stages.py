"""Where `build-engine --stages` cuts a target, and what it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outrider.backends import registry
from outrider.backends.base import Backend, Engines
from outrider.backends.comparison import alike
from outrider.backends.onnxruntime.backend import OnnxRuntimeBackend
from outrider.backends.onnxruntime.engine import OnnxRuntimeEngines
from outrider.backends.open import open_bundle, open_engines, read_bundle
from outrider.backends.rewriting.parts import weights_of, weights_read
from outrider.builder.build import build_engine
from outrider.builder.defaults import BackendChoice
from outrider.builder.stages import balanced, cut_target
from outrider.bundle.folder import read_manifest
from outrider.bundle.manifest import Build, Manifest
from outrider.engines.device import Cpu
from outrider.engines.session import Session
from outrider.engines.sizes import Sizes
from outrider.errors import DeviceError, FolderError
from outrider.serve.cluster import cluster
from outrider.tests.support import bench_once, build, run_here


@pytest.mark.parametrize(
    ("sizes", "stages", "ends"),
    [
        ([1, 1, 1, 1], 2, [2, 4]),
        ([5, 1, 1, 1, 1, 1], 2, [1, 6]),  # a large embedding
        ([1, 1, 1, 1, 1, 5], 2, [5, 6]),  # a large head
        ([4, 2, 2, 2, 2, 4], 4, [1, 3, 5, 6]),
        ([3, 9, 3], 3, [1, 2, 3]),
    ],
)
def test_the_largest_stage_is_as_small_as_it_can_be(sizes: list[int], stages: int, ends: list[int]) -> None:
    assert balanced(sizes, stages) == ends


def test_a_pass_reads_all_weights_but_the_embedding(tiny_export: Path) -> None:
    first, last = cut_target("2", tiny_export, on_cpu=True).parts
    tables = [each for name, each in first.graph.initializers.items() if "embed" in name]
    assert weights_of(first) - weights_read(first) == sum(each.const_value.nbytes for each in tables if each.const_value) > 0
    assert weights_read(last) == weights_of(last)


@pytest.mark.parametrize(
    "wanted", ["0", "1", "3", "two", "0-1", "1,0", "0,0-1", "0-0,1-2", "0,1,", "1-0,1", "0-9999999999999,1", "9" * 5000]
)
def test_stages_that_do_not_fit_are_refused(tiny_export: Path, tmp_path: Path, wanted: str) -> None:
    done = run_here("build-engine", tiny_export, "-o", tmp_path / "bundle", "--backend", "onnxruntime", "--stages", wanted)
    assert done.returncode == 2
    assert "use --stages 2" in done.stderr
    assert not (tmp_path / "bundle").exists()


def test_a_backend_without_stages_is_refused(tiny_export: Path, tmp_path: Path) -> None:
    done = run_here("build-engine", tiny_export, "-o", tmp_path / "bundle", "--backend", "tensorrt-rtx", "--stages", "2")
    assert done.returncode == 2
    assert "the backend tensorrt-rtx runs no stages" in done.stderr
    assert "--backend onnxruntime or openvino" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--stages", "2", "--stage-device", "cpu"), "names 1 device, and the target has 2 stages"),
        (("--stage-device", "cpu,cpu"), "names 2 devices, and the target has no stages"),
        (("--stages", "2", "--stage-device", "gpu,cpu"), "onnxruntime has no device 'gpu' for stages"),
        (("--stages", "2", "--stage-device", "cpu:1,cpu"), "onnxruntime has no device 'cpu:1' for stages"),
        (("--stages", "2", "--stage-device", "cuda:one,cuda:0"), "onnxruntime has no device 'cuda:one' for stages"),
        (("--stages", "2", "--stage-device", "cpu:threads=0,cpu"), "use cpu, cuda, cuda:0, or cpu:threads=4 for 4 threads"),
        (("--stages", "2", "--stage-device", "cpu,cuda:threads=2"), "onnxruntime has no device 'cuda:threads=2' for stages"),
        (("--stages", "2", "--stage-device", "cpu,cpu", "--device", "cpu"), "--device and --stage-device both say where"),
    ],
)
def test_devices_that_do_not_fit_are_refused(tiny_export: Path, tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    done = run_here("build-engine", tiny_export, "-o", tmp_path / "bundle", "--backend", "onnxruntime", *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--stages", "2", "--stage-backend", "openvino"), "--stage-backend names 1 backend, and the target has 2 stages"),
        (("--stage-backend", "openvino,onnxruntime"), "names 2 backends, and the target has no stages"),
        (("--stages", "2", "--stage-backend", "onnx,openvino"), "there is no backend 'onnx'"),
        (("--stages", "2", "--stage-backend", "tensorrt-rtx,onnxruntime"), "the backend tensorrt-rtx runs no stages"),
        (("--stages", "2", "--stage-backend", "onnxruntime,auto"), "auto is no backend"),
        (("--stages", "2", "--stage-backend", "openvino,openvino", "--backend", "openvino"), "--backend and --stage-backend"),
        (
            ("--stages", "2", "--stage-backend", "openvino,onnxruntime", "--stage-device", "cuda:0,cpu"),
            "openvino has no device 'cuda:0' for stages",
        ),
        (
            ("--stages", "2", "--stage-backend", "onnxruntime,openvino", "--device", "gpu"),
            "onnxruntime has no device 'gpu' for stages",
        ),
    ],
)
def test_backends_that_do_not_fit_are_refused(
    tiny_export: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    done = run_here("build-engine", tiny_export, "-o", tmp_path / "bundle", *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "bundle").exists()


@pytest.fixture(scope="module")
def placed(tiny_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose stages are on two GPUs, built without them."""
    folder = tmp_path_factory.mktemp("placed") / "bundle"
    return build(tiny_export, folder, stages="2", stage_devices=("cuda:0", "cuda:1"))


@pytest.mark.parametrize("options", [{"stages": "2", "stage_devices": ("cuda", "cpu")}, {"draft_device": "cuda:0"}])
def test_the_backend_that_is_chosen_has_the_devices(
    tiny_export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """OpenVINO would be faster on the CPU, and has no GPUs of NVIDIA."""

    def chosen(*_: object) -> None:
        raise DeviceError("it was chosen", "")

    monkeypatch.setattr(OnnxRuntimeBackend, "build", chosen)
    ranked = [BackendChoice(name, "") for name in ("openvino", "onnxruntime")]
    monkeypatch.setattr("outrider.builder.build.backends", lambda manifest: ranked)
    with pytest.raises(DeviceError, match="it was chosen"):
        build_engine(tiny_export, tmp_path / "bundle", backend="auto", k=[1], batch=1, **options)


def test_each_stage_is_opened_on_its_device_and_the_rest_on_the_last_ones(
    placed: Path, tiny_export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: dict[str | None, Engines] = {}

    def on_cpu(_: Backend, folder: Path, manifest: Manifest, build: Build, device: str | None) -> Engines:
        return opened.setdefault(device, OnnxRuntimeEngines(folder, manifest, build, Cpu()))

    monkeypatch.setattr(OnnxRuntimeBackend, "open", on_cpu)
    manifest, made = open_bundle(placed)
    engines = open_engines(placed, manifest, made)
    assert engines is opened["cuda:1"]
    assert engines.others == {"cuda:0": opened["cuda:0"]}
    models: list[Engines] = []
    model = OnnxRuntimeEngines.model

    def noted(self: OnnxRuntimeEngines, role: str, sizes: Sizes) -> Session:
        models.append(self)
        return model(self, role, sizes)

    monkeypatch.setattr(OnnxRuntimeEngines, "model", noted)
    engines.session("target", 1)
    assert models == [opened["cuda:0"], opened["cuda:1"]]
    exact, _, unrounded = alike(engines, tiny_export, read_manifest(tiny_export))
    exact.session("target", 1)
    assert unrounded
    assert models[2:] == [exact.others["cuda:0"], exact]
    assert not {*models[2:]} & {*models[:2]}
    opened.clear()
    assert open_engines(placed, manifest, made, "cpu").others == {}  # one device for all, if the user wants one
    assert [*opened] == ["cpu"]


def test_a_bundle_shows_the_devices_of_its_stages_and_forgets_them_with_another_device(placed: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(placed, tmp_path / "bundle"))
    shown = " ".join(run_here("inspect", bundle).stdout.replace("\u2502", " ").split())
    assert "per sequence, on cuda:0" in shown
    assert "on cuda:1" in shown
    done = run_here("calibrate", bundle, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    made = read_manifest(bundle).build
    assert made is not None
    assert (made.device, [stage.device for stage in made.stages]) == ("cpu", [None, None])


def test_replicas_ask_for_the_gpus_of_their_stages(placed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the last one in use, and one more for each stage in a process of its own."""
    scales = list[cluster.Scale]()
    monkeypatch.setattr(cluster, "run", lambda _, scale, *others: scales.append(scale))
    monkeypatch.setattr("outrider.serve.log.log_as_json", lambda: None)
    for options in ((), ("--stage-cores", "3"), ("--stage-cores", "3", "--device", "cpu")):
        assert run_here("serve", placed, "--ray", *options).returncode == 0
    asked = [(each.cpus, each.gpus, each.stages) for each in scales]
    assert asked == [(1, 2, []), (1, 2, [{"CPU": 3, "GPU": 1}]), (1, 0, [{"CPU": 3}])]


def test_what_has_no_stages_is_refused_before_anything_is_made(tiny_bundle: Path) -> None:
    for command in (("serve", tiny_bundle), ("serve", tiny_bundle, "--ray"), ("generate", "owner/name", "--prompt", "a")):
        done = run_here(*command, "--stage-cores", "1")
        assert (done.returncode, "needs a bundle with stages" in done.stderr) == (2, True), done.stderr


def test_a_machine_without_the_gpus_says_so(placed: Path) -> None:
    done = run_here("generate", placed, "--prompt", "a")
    assert done.returncode == 1
    assert "no NVIDIA GPU found" in done.stderr or "cuda-bindings cannot be imported" in done.stderr
    assert run_here("generate", placed, "--prompt", "a", "--max-new-tokens", "3", "--device", "cpu").returncode == 0


def test_a_link_is_not_added_to_costs_that_have_it(placed: Path) -> None:
    done = run_here("plan", placed, "--link", "1", "1")
    assert done.returncode == 2
    assert "were measured with the copies between its devices" in done.stderr
    assert run_here("plan", placed).returncode == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [({"device": "gpu"}, "onnxruntime has no device 'gpu' for stages"), ({"threads": 2}, "cuda:0 has no threads")],
)
def test_a_device_that_the_backend_lacks_and_threads_of_a_gpu_are_damage(
    placed: Path, change: dict[str, object], message: str
) -> None:
    manifest = read_manifest(placed)
    assert manifest.build is not None
    stages = [msgspec.structs.replace(stage, **change) for stage in manifest.build.stages]
    with pytest.raises(FolderError, match=message):
        registry.REFERENCE.check(manifest, msgspec.structs.replace(manifest.build, stages=stages))


def test_commands_take_a_bundle_in_stages(tiny_export: Path, tmp_path: Path) -> None:
    bundle = build(tiny_export, tmp_path / "bundle", k=[2], capacity=96, stages="2")
    before = read_manifest(bundle).build
    assert bench_once(bundle, "the quick", tmp_path).bundle
    for arguments in (
        ("calibrate", bundle),
        ("plan", bundle, "--link", "0.2", "1", "--rate", "0.7"),
        ("plan", bundle, "--bench", tmp_path / "report" / "bench.json"),
        ("generate", bundle, "--prompt", "a", "--max-new-tokens", "4"),
    ):
        done = run_here(*arguments)
        assert done.returncode == 0, (arguments, done.stderr)
    after = read_manifest(bundle).build
    assert before is not None
    assert after is not None
    assert after.stages == before.stages
    assert after.costs["target"] != before.costs["target"]


def test_commands_take_stages_of_two_backends(tiny_export: Path, tmp_path: Path) -> None:
    bundle, backends = tmp_path / "bundle", ("onnxruntime", "openvino")
    options = ("--k", "1", "--capacity", "64", "--stages", "2", "--stage-backend", ",".join(backends))
    done = run_here("build-engine", tiny_export, "-o", bundle, *options)
    assert done.returncode == 0, done.stderr
    made = read_manifest(bundle).build
    assert made is not None
    assert (made.backend, made.other_backends, bool(made.costs)) == ("openvino", ["onnxruntime"], True)
    other = made.stages[0].backend
    assert other is not None
    assert other.rewrites
    shown = " ".join(run_here("inspect", bundle).stdout.replace("\u2502", " ").split())
    assert f"by onnxruntime {other.version}" in shown
    for arguments in (
        ("calibrate", bundle),
        ("plan", bundle, "--link", "0.2", "1", "--rate", "0.7"),
        ("verify", bundle, "--engines", tiny_export),
    ):
        done = run_here(*arguments)
        assert done.returncode == 0, (arguments, done.stderr, done.stdout)
    done = run_here("generate", bundle, "--prompt", "a", "--device", "cuda")
    assert done.returncode == 2
    assert "openvino does not run on cuda" in done.stderr
    seen = made.seen_by("onnxruntime")
    assert (seen.backend, seen.rewrites) == ("onnxruntime", {"target": other.rewrites})
    assert seen.seen_by("openvino") == msgspec.structs.replace(made, rewrites={"target": made.rewrites["target"]})
    stages = [msgspec.structs.replace(stage, device="gpu") for stage in made.stages]
    (bundle / "manifest.json").write_bytes(
        msgspec.structs.replace(read_manifest(bundle), build=msgspec.structs.replace(made, stages=stages)).encode()
    )
    with pytest.raises(FolderError, match="onnxruntime has no device 'gpu' for stages"):
        read_bundle(bundle)


def test_a_bundle_shows_its_stages(tiny_export: Path, tmp_path: Path) -> None:
    """It is measured, sealed and checked like every other one."""
    bundle = tmp_path / "bundle"
    done = run_here("build-engine", tiny_export, "-o", bundle, "--k", "1", "--capacity", "64", "--stages", "0,1")
    assert done.returncode == 0, done.stderr
    build = read_manifest(bundle).build
    assert build is not None
    assert [stage.layers for stage in build.stages] == [(0, 0), (1, 1)]
    assert build.costs["target"]
    shown = run_here("inspect", bundle)
    assert shown.returncode == 0, shown.stderr
    for number, stage in enumerate(build.stages):
        row = next(line for line in shown.stdout.splitlines() if f"stage {number + 1}, layers {number}-{number}" in line)
        assert f"{stage.bytes:,} bytes" in row
