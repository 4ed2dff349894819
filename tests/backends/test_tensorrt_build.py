"""TensorRT-RTX builds, on any machine: what they record, and what is said where they fail."""

from __future__ import annotations

import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnx
import psutil
import pytest

from outrider.backends.tensorrt.job import PROGRESS_PARTS, BuildJob, BuildOptions
from outrider.backends.tensorrt.package import RTX, plan_file
from outrider.backends.tensorrt.process import build_plan
from outrider.backends.tensorrt.profiles import step_profiles
from outrider.bundle.folder import read_manifest
from outrider.bundle.integrity import check_files
from outrider.engines.contract import cache_tensors
from outrider.errors import EngineError, UsageError
from outrider.progress import Progress
from outrider.tests.support import COMMAND, build, full_disk, reseal, run, run_here

trt: Any = pytest.importorskip("tensorrt_rtx", reason="would show that the engines build: pip install 'outrider[rtx]'")
KNOWN = "7.5, 8.0, 8.6, 8.9, 12.0"


@pytest.mark.slow  # the next test has what does not depend on the precision
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_a_pair_builds_with_every_profile(precision: str, tiny_exports: Callable[[str], Path], tmp_path: Path) -> None:
    export = tiny_exports(precision)
    level = {"optimization_level": 0}  # which takes less long, and leaves the rest as it is by default
    bundle = build(export, tmp_path / "bundle", backend="tensorrt-rtx", capacity=256, k=[1, 4], options=level)
    manifest = read_manifest(bundle)
    check_files(bundle, manifest)
    made = manifest.build
    assert made is not None
    assert (made.backend, made.backend_version, made.costs) == ("tensorrt-rtx", trt.__version__, {})
    assert (made.compute_capabilities, made.version_compatible) == ([], False)
    assert "8.0, 8.6, 8.9 and 12.x" in made.device
    assert manifest.models["target"].precision == precision
    texts = {"tokenizer.json", "chat_template.jinja"} & read_manifest(export).files.keys()
    assert set(manifest.files) == texts | set(map(plan_file, manifest.engines))
    for role in ("target", "draft"):
        assert made.rows(role) == [(1, 16), (1, 1), (2, 2), (5, 5)]
        assert manifest.files[plan_file(role)].size > (export / role / "model.onnx.data").stat().st_size
        assert {tuple(profile) for profile in made.profiles[role]} == {("input_ids", "positions", "key_positions")}
    assert made.rows("draft_sampler") == [(1, 1)]
    assert made.rows("verifier") == made.rows("logprobs") == [(1, 1), (2, 2), (5, 5)]
    shown = run_here("inspect", bundle)
    assert shown.returncode == 0, shown.stderr
    assert "1-16, 1, 2, 5" in shown.stdout
    assert "the package's default" in shown.stdout


def test_it_has_a_plan_of_every_engine_with_every_profile(rtx_bundle: Path, tiny_export: Path) -> None:
    manifest = read_manifest(rtx_bundle)
    check_files(rtx_bundle, manifest)
    made = manifest.build
    assert made is not None
    assert (made.backend, made.backend_version, made.costs) == ("tensorrt-rtx", trt.__version__, {})
    assert not made.version_compatible
    texts = {"tokenizer.json", "chat_template.jinja"} & read_manifest(tiny_export).files.keys()
    assert set(manifest.files) == texts | set(map(plan_file, manifest.engines))
    chunk = made.max_prompt_chunk
    for role in ("target", "draft"):
        assert made.rows(role) == [(1, chunk), (1, 1), (2, 2), (5, 5)]
        assert manifest.files[plan_file(role)].size > (tiny_export / role / "model.onnx.data").stat().st_size
        assert {tuple(profile) for profile in made.profiles[role]} == {("input_ids", "positions", "key_positions")}
    assert made.rows("draft_sampler") == [(1, 1)]
    assert made.rows("verifier") == made.rows("logprobs") == [(1, 1), (2, 2), (5, 5)]
    shown = run_here("inspect", rtx_bundle)
    assert shown.returncode == 0, shown.stderr
    assert f"1-{chunk}, 1, 2, 5" in shown.stdout


@pytest.mark.slow  # each takes a minute; the pair shows in CI that step models build
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("drafter", ["trained head", "random parallel"])
def test_further_drafters_build(
    precision: str, drafter: str, drafter_exports: Callable[[str, str], Path], tmp_path: Path
) -> None:
    bundle = build(drafter_exports(precision, drafter), tmp_path / "bundle", backend="tensorrt-rtx", k=[1, 4])
    manifest = read_manifest(bundle)
    made = manifest.build
    assert made is not None
    assert set(map(plan_file, manifest.engines)) <= manifest.files.keys()
    assert made.rows("target") == [(1, 16), (1, 1), (2, 2), (5, 5)]
    if drafter == "trained head":
        assert made.rows("head") == made.rows("target")
        assert "feature_positions" in made.profiles["head"][0]
    else:
        assert made.rows("parallel-draft") == [(1, 16), (1, 8)]


def test_options_reach_the_builder(rtx_bundle: Path) -> None:
    """Those of the fixture, whose command wrote this."""
    written, told = ((rtx_bundle.parent / name).read_text() for name in ("stdout", "stderr"))
    assert "warning: " in told  # of the parser: int64 inputs
    assert "cudaError" not in told
    assert "12.0, 8.9" in written
    made = read_manifest(rtx_bundle).build
    assert made is not None
    assert made.compute_capabilities == ["12.0", "8.9"]
    assert made.device == "GPUs of compute capability 12.0, 8.9"
    assert made.profiles["draft"][2]["input_ids"] == ([1, 2], [3, 2], [3, 2])


def test_the_builder_reports_a_workspace_that_is_too_small(tiny_export: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"failed while building the .* within workspace limit") as caught:
        build(tiny_export, tmp_path / "out", backend="tensorrt-rtx", options={"workspace": 1e-9})
    assert "--workspace" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("backend", "options", "message", "hint"),
    [
        ("onnxruntime", {"workspace": 1}, "--workspace does not apply to the backend onnxruntime", "tensorrt-rtx and"),
        ("onnxruntime", {"compute_capability": ("8.9",)}, "--compute-capability does not apply", "it is for tensorrt-rtx"),
        ("tensorrt", {"compute_capability": ("8.9",)}, "--compute-capability does not apply to the backend tensorrt", "-rtx"),
        ("tensorrt-rtx", {"speed": 9}, "--speed does not apply to the backend tensorrt-rtx", "no backend has it"),
        ("tensorrt-rtx", {"timing_cache": "x"}, "--timing-cache does not apply to the backend tensorrt-rtx", "tensorrt"),
        ("tensorrt-rtx", {"hardware_compatible": True}, "--hardware-compatible does not apply", "it is for tensorrt"),
        ("tensorrt-rtx", {"version_compatible": True}, "--version-compatible does not apply", "it is for tensorrt"),
        ("tensorrt-rtx", {"compute_capability": ("8.9", "9.0")}, "does not build for compute capability '9.0'", KNOWN),
        ("tensorrt-rtx", {"compute_capability": ("",)}, "does not build for compute capability ''", KNOWN),
        ("tensorrt-rtx", {"workspace": -1}, "workspace of -1 GiB", "--workspace 2"),
        ("tensorrt-rtx", {"optimization_level": 6}, "no optimization level 6", "0 to 5"),
        ("tensorrt-rtx", {"verbosity": "loud"}, "no verbosity 'loud'", "error, warning"),
    ],
)
def test_an_option_that_does_not_apply_is_wrong_use(
    tiny_export: Path, tmp_path: Path, backend: str, options: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        build(tiny_export, tmp_path / "out", backend=backend, options=options)
    assert message in str(caught.value)
    assert hint in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_sizes_that_tensorrt_cannot_count_are_wrong_use(tiny_export: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="TensorRT's limit is 1,099,511,627,776"):
        build(tiny_export, tmp_path / "out", backend="tensorrt-rtx", batch=10**15)


@pytest.mark.skipif(find_spec("tensorrt") is not None, reason="would show what is said without the package")
def test_a_missing_package_is_reported_with_its_extra(tiny_export: Path, tmp_path: Path) -> None:
    done = run_here("build-engine", tiny_export, "-o", tmp_path / "out", "--backend", "tensorrt")
    assert done.returncode == 1
    assert "error: TensorRT's builder cannot be imported: No module named 'tensorrt'" in done.stderr
    assert "pip install 'outrider[tensorrt]'" in done.stderr
    assert list(tmp_path.iterdir()) == []


def altered(export: Path, folder: Path, change: Callable[[onnx.GraphProto], None]) -> Path:
    """A copy of an export whose target's graph, which is built first, is changed."""
    copy = Path(shutil.copytree(export, folder / "onnx"))
    model = onnx.load(copy / "target" / "model.onnx", load_external_data=False)
    change(model.graph)
    onnx.save(model, copy / "target" / "model.onnx")
    reseal(copy)
    return copy


def test_a_node_that_the_parser_refuses_is_named(tiny_export: Path, tmp_path: Path) -> None:
    def add_a_draw(graph: onnx.GraphProto) -> None:
        graph.node.append(onnx.helper.make_node("BitwiseNot", ["input_ids"], ["odd"], name="odd_one"))

    export = altered(tiny_export, tmp_path, add_a_draw)
    with pytest.raises(
        EngineError, match=r"refuses the graph while building the target: node 'odd_one' \(BitwiseNot\)"
    ) as caught:
        build(export, tmp_path / "bundle", backend="tensorrt-rtx")
    assert "docs/models.md" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["onnx"]


def test_a_cache_that_is_not_updated_in_place_is_refused(tiny_export: Path, tmp_path: Path) -> None:
    def swap(graph: onnx.GraphProto) -> None:
        other = {"present_key_0": "present_value_0", "present_value_0": "present_key_0"}
        for node in graph.node:
            for names in (node.input, node.output):
                names[:] = [other.get(name, name) for name in names]

    export = altered(tiny_export, tmp_path, swap)
    with pytest.raises(EngineError, match="present_key_0 is not past_key_0 updated in place"):
        build(export, tmp_path / "bundle", backend="tensorrt-rtx")


def building(
    export: Path, output: Path, act: Callable[[psutil.Process, psutil.Process], None], **options: Any
) -> tuple[int, str]:
    """Run `build-engine`, and let `act` have the command and its child while TensorRT builds the first engine."""
    arguments = ["build-engine", str(export), "-o", str(output), "--backend", "tensorrt-rtx", "--capacity", "512"]
    with subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True, **options) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("building the target ..."):
                time.sleep(0.7)  # of two seconds
                parent = psutil.Process(process.pid)
                (child,) = parent.children()
                act(parent, child)
                break
        rest = process.stderr.read()
    assert not [path for path in output.parent.iterdir() if path.name == output.name]
    return process.wait(), rest


@pytest.mark.parametrize(
    ("sign", "message"),
    [
        (signal.SIGSEGV, "TensorRT-RTX crashed while building the target"),
        (signal.SIGKILL, "TensorRT-RTX ran out of memory while building the target"),  # the system's way to say so
    ],
)
def test_a_crash_is_an_error_message(trained_export: Path, tmp_path: Path, sign: signal.Signals, message: str) -> None:
    code, rest = building(trained_export, tmp_path / "out", lambda _, child: child.send_signal(sign))
    assert code == 1
    error, hint = rest.splitlines()
    assert error.startswith(f"error: {message}")
    assert (sign.name in error) == (sign == signal.SIGSEGV)
    assert hint.startswith("hint:  ")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_ends_the_child_and_leaves_nothing(trained_export: Path, tmp_path: Path) -> None:
    children = []

    def interrupt(parent: psutil.Process, child: psutil.Process) -> None:
        children.append(child)
        parent.send_signal(signal.SIGINT)

    code, rest = building(
        trained_export, tmp_path / "out", interrupt, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    )
    assert code == 130
    assert "Traceback" not in rest
    assert not children[0].is_running()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_command_takes_its_child_along(trained_export: Path, tiny_export: Path, tmp_path: Path) -> None:
    children = []

    def kill(parent: psutil.Process, child: psutil.Process) -> None:
        children.append(child)
        parent.kill()

    building(trained_export, tmp_path / "out", kill)
    gone_by = time.monotonic() + 20
    while children[0].is_running() and children[0].status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < gone_by
        time.sleep(0.05)
    build(tiny_export, tmp_path / "out")  # nothing is in the way
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_too_little_memory_reports_the_sizes_and_what_reduces_them(tiny_export: Path, tmp_path: Path) -> None:
    def little() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (700 << 20, 700 << 20))

    sizes = ("--capacity", "128", "--k", "1,2")
    done = run("build-engine", tiny_export, "-o", tmp_path / "out", "--backend", "tensorrt-rtx", *sizes, preexec_fn=little)
    assert done.returncode == 1
    error, hint = done.stderr.splitlines()[-2:]
    assert "TensorRT-RTX ran out of memory while building the target" in error
    assert "a batch of 1, a capacity of 128, a prompt chunk of 64, k = 1, 2" in error
    assert "GiB of memory are free" in error
    for option in ("--max-prompt-chunk", "--batch", "--capacity", "--workspace", "--k"):
        assert option in hint
    assert list(tmp_path.iterdir()) == []


def test_a_plan_is_not_written_in_part_if_the_disk_is_full(tiny_export: Path, tmp_path: Path) -> None:
    sizes = ("--k", "1", "--capacity", "64", "--max-prompt-chunk", "16", "--optimization-level", "0")
    with full_disk(1 << 16):
        done = run_here("build-engine", tiny_export, "-o", tmp_path / "out", "--backend", "tensorrt-rtx", *sizes)
    assert done.returncode == 1
    assert "error: no room to write" in done.stderr
    assert list(tmp_path.iterdir()) == []


class Parts(Progress):
    done = 0

    def advance(self, size: int) -> None:
        self.done += size


def test_progress_ends_at_the_end_and_the_timing_cache_is_kept(tiny_export: Path, tmp_path: Path) -> None:
    """The cache is offered for `tensorrt` only, but is the same code in both packages."""
    job = BuildJob(
        package=RTX,
        options=BuildOptions(timing_cache=str(tmp_path / "timings")),
        graph=str(tiny_export / "draft" / "model.onnx"),
        plan=str(tmp_path / "plan"),
        cache=cache_tensors(read_manifest(tiny_export).models["draft"].layers),
        capacity=64,
        profiles=step_profiles([1], 64, 1, 8),
    )
    parts = Parts()
    build_plan(job, "draft", progress=parts)
    assert parts.done == PROGRESS_PARTS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan", "timings"]
    build_plan(job, "draft")
