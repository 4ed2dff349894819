"""Bundles: sealed, measured, and refused where the numbers do not fit."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import outrider.builder.build as build_module
from outrider.backends.base import Engines
from outrider.backends.open import open_bundle, open_engines
from outrider.builder import passes as passes_module
from outrider.builder.build import build_engine
from outrider.builder.passes import FEW_RUNS, TIMED_RUNS, measure
from outrider.bundle.folder import read_manifest
from outrider.bundle.manifest import ROLES
from outrider.engines.device import Cpu
from outrider.engines.samplers import DRAFT_SAMPLERS, SAMPLERS
from outrider.engines.session import Session
from outrider.errors import EngineError, FolderError, UsageError
from outrider.progress import SILENT
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.text.text import Text
from outrider.tests.deferred import DeferredEngines
from outrider.tests.support import build, reseal, run_here


def test_the_manifest_says_how_it_was_built(tiny_bundle: Path, tiny_export: Path) -> None:
    import onnxruntime

    manifest = read_manifest(tiny_bundle)
    made = manifest.build
    assert made is not None
    assert (made.backend, made.backend_version, made.k) == ("onnxruntime", onnxruntime.__version__, [1, 2, 4, 8])
    assert (made.capacity, made.batch, made.max_prompt_chunk, made.windows) == (160, 1, 16, [64, 128, 160])
    assert manifest.models == read_manifest(tiny_export).models
    for role in ("target", "draft"):
        measured = {window: {cost.rows for cost in made.costs[role] if cost.window == window} for window in made.windows}
        assert measured == {64: {1, 2, 3, 5, 9, 16}, 128: {1, 2, 3, 5, 9}, 160: {1, 2, 3, 5, 9, 16}}
        for cost in made.costs[role]:
            assert cost.batch == 1
            assert 0 < cost.fastest <= cost.median <= cost.slowest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": []}, "k is empty"),
        ({"k": [0, 4]}, "each must be at least 1"),
        ({"k": [-1]}, "each must be at least 1"),
        ({"batch": 0}, "batch is 0"),
        ({"capacity": 9}, "does not hold k = 8"),
        ({"capacity": 257}, "supports 256 positions"),
        ({"max_prompt_chunk": 0}, "prompt chunk of 0"),
        ({"max_prompt_chunk": 161}, "prompt chunk of 161"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(tiny_export: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        build(tiny_export, tmp_path / "bundle", **options)
    assert caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_no_memory_holds_is_refused(tiny_export: Path, tmp_path: Path) -> None:
    with pytest.raises(
        EngineError,
        match=r"no memory for a cache of 1000000000000000 x 160 positions: it takes [\d,]{20,} bytes, and there are [\d,]+$",
    ):
        build(tiny_export, tmp_path / "bundle", batch=10**15, measured=None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("stages", [None, "2"])
def test_caches_that_only_fit_one_by_one_are_refused(
    tiny_export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: str | None, backend: str
) -> None:
    """Stages have a cache each, and the system kills a process whose memory runs out in the last one."""
    bundle = build(tiny_export, tmp_path / "bundle", backend=backend, stages=stages, batch=8)
    layers = read_manifest(bundle).models["target"].layers
    size = 8 * 160 * sum(heads * (key + value) for heads, key, value in layers) * 4
    monkeypatch.setattr(Cpu, "memory", lambda _: (size - 1, size - 1))
    with pytest.raises(EngineError, match=r"no memory for a cache of 8 x 160 positions: it takes [\d,]+ bytes, and there are"):
        Outrider.load(bundle, slots=None)
    monkeypatch.setattr(Cpu, "memory", lambda _: (4 * size, 4 * size))
    Outrider.load(bundle, slots=None).close()


def test_only_an_export_can_be_built(tiny_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="is already a bundle"):
        build(tiny_bundle, tmp_path / "bundle")
    with pytest.raises(FolderError, match="neither an export nor a bundle"):
        build(tmp_path, tmp_path / "bundle")


@pytest.mark.parametrize("stages", [None, "2", "0,1"])
@pytest.mark.parametrize("name", ["draft/model.onnx.data", "target/model.onnx.data", "target/model.onnx"])
def test_a_damaged_export_is_refused_and_nothing_is_written(
    tiny_export: Path, tmp_path: Path, name: str, stages: str | None
) -> None:
    copy = Path(shutil.copytree(tiny_export, tmp_path / "onnx"))
    whole = (copy / name).read_bytes()
    changed = bytearray(whole)
    changed[len(whole) // 2] ^= 1
    for damage, message in (b"", "the manifest says"), (whole[:-9], "the manifest says"), (changed, "SHA-256 differs"):
        (copy / name).write_bytes(damage)
        with pytest.raises(FolderError, match=message):
            build(copy, tmp_path / "bundle", stages=stages)
    (copy / name).unlink()
    with pytest.raises(FolderError, match="cannot be read: No such file or directory"):
        build(copy, tmp_path / "bundle", stages=stages)
    assert [path.name for path in tmp_path.iterdir()] == ["onnx"]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_on_the_cpu(trained_exports: Callable[[str], Path], tmp_path: Path, precision: str) -> None:
    """fp16 runs (ONNX Runtime computes it in fp32); bf16 has no kernels there, and is refused with the hint."""
    export = trained_exports(precision)
    if precision == "bf16":
        with pytest.raises(EngineError, match="no CPU kernels for bf16") as caught:
            build(export, tmp_path / "bundle", measured=None)
        assert "--precision fp32" in caught.value.hint
        assert not (tmp_path / "bundle").exists()
        return
    outrider = Outrider.load(build(export, tmp_path / "bundle"))
    params = SamplingParams(max_new_tokens=60)
    plain, speculative = (
        [token for event in outrider.generate("the quick", params, k=k) for token in event.token_ids] for k in (0, 4)
    )
    assert plain == speculative


def test_the_capacity_defaults_to_what_the_models_were_made_for(tiny_export: Path, tmp_path: Path) -> None:
    made = build_engine(tiny_export, tmp_path / "b", backend="onnxruntime", k=[4], batch=1, max_prompt_chunk=8).build
    assert made is not None
    assert made.capacity == 256
    small = build_engine(tiny_export, tmp_path / "small", backend="onnxruntime", k=[4], capacity=20, batch=1).build
    assert small is not None
    assert small.max_prompt_chunk == 20


def test_k_is_sorted_and_each_is_built_once(tiny_export: Path, tmp_path: Path) -> None:
    made = read_manifest(build(tiny_export, tmp_path / "b", k=[4, 1, 4], capacity=64, max_prompt_chunk=8)).build
    assert made is not None
    assert made.k == [1, 4]


def test_a_build_loads_each_model_once_and_fits_what_it_does_not_time(
    tiny_export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[str, int]] = []

    def counted(*where: Any) -> Engines:
        engines = open_engines(*where)
        session = engines.session

        def counting(role: str, batch: int) -> Session:
            opened.append((role, batch))
            return session(role, batch)

        monkeypatch.setattr(engines, "session", counting)
        return engines

    monkeypatch.setattr(build_module, "open_engines", counted)
    monkeypatch.setattr(passes_module, "ENOUGH", 1e-9)
    done = run_here(
        "build-engine", tiny_export, "-o", tmp_path / "b", *shlex.split("--k 2 --capacity 100 --batch 3 --max-prompt-chunk 8")
    )
    assert done.returncode == 0, done.stderr
    made = read_manifest(tmp_path / "b").build
    assert made is not None
    assert sorted(opened) == [("draft", 3), ("target", 3)]
    for name, costs in made.costs.items():
        windows = (64, 100) if name in ROLES else (0,)
        rows = {1} if name in DRAFT_SAMPLERS else {1, 2, 3} | ({8} if name in ROLES else set())
        every = {(r, window, batch) for r in rows for window in windows for batch in (1, 2, 3)}
        assert {(cost.rows, cost.window, cost.batch): cost.runs for cost in costs} == {
            (r, window, batch): 0
            if batch == 2 or (r in (2, 8) and (window == 100 or batch == 3))
            else 1
            if name in ROLES and (r == 8 or batch == 3)
            else FEW_RUNS
            if name in ROLES
            else TIMED_RUNS
            for r, window, batch in every
        }
        assert all(0 < cost.fastest <= cost.median <= cost.slowest for cost in costs)
    assert set(made.costs) == {"target", "draft", *SAMPLERS}
    timed, fitted = made.timed
    assert (timed + fitted, fitted) == (sum(map(len, made.costs.values())), 2 * (8 + 6) + 3 * (3 + 1) + 2)
    assert f"costs: {timed} passes timed, {fitted} fitted; outrider calibrate times all of them" in done.stdout
    assert made.acceptance == {}  # none of the shipped prompts fits into so small a cache


def test_calibrate_measures_again_and_changes_nothing_else(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, bundle)
    before = read_manifest(bundle)
    assert before.build is not None
    done = run_here("calibrate", bundle)
    assert done.returncode == 0, done.stderr
    after = read_manifest(bundle)
    assert after.build is not None
    assert {name: {(c.rows, c.window, TIMED_RUNS) for c in costs} for name, costs in before.build.costs.items()} == {
        name: {(c.rows, c.window, c.runs) for c in costs} for name, costs in after.build.costs.items()
    }
    builds = [msgspec.structs.replace(each, costs={}, acceptance={}) for each in (before.build, after.build)]
    assert builds[0] == builds[1]
    assert msgspec.structs.replace(after, build=before.build) == before
    assert [each.name for each in tmp_path.iterdir()] == ["bundle"]
    refused = run_here("calibrate", tmp_path / "none")
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 2)
    (bundle / ".manifest.json.partial").mkdir()  # where root may write anywhere, this is in the way
    refused = run_here("calibrate", bundle)
    assert (refused.returncode, "cannot write" in refused.stderr, "measuring" in refused.stderr) == (1, True, False)
    assert read_manifest(bundle) == after


def test_an_acceptance_that_cannot_be_measured_again_is_kept(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> dict[str, float]:
        raise UsageError("the chat template refuses it", "take another")

    monkeypatch.setattr(build_module, "measure_acceptance", fails)
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    made = read_manifest(bundle).build
    assert made is not None
    monkeypatch.setattr(build_module, "measure", lambda *_, **__: made.costs)
    reseal(bundle, build=msgspec.structs.replace(made, acceptance={"model": 0.7}))
    sealed = build_module.calibrate(bundle)
    assert sealed.build is not None
    assert sealed.build.acceptance == {"model": 0.7}
    assert read_manifest(bundle) == sealed


@pytest.mark.parametrize("refusal", [None, "not here"])
def test_where_rounds_are_recorded_passes_are_measured_in_recordings(tiny_bundle: Path, refusal: str | None) -> None:
    engines = DeferredEngines(tiny_bundle, *open_bundle(tiny_bundle))
    engines.device.refusal = refusal
    costs = measure(Outrider(engines, Text.load(tiny_bundle, engines.manifest)), SILENT, fit=False)
    passes = sum(map(len, costs.values()))
    assert {name: {(each.rows, each.window) for each in some} for name, some in costs.items()} == {
        name: {(each.rows, each.window) for each in some if each.batch == 1} for name, some in engines.build.costs.items()
    }
    if refusal is None:
        assert engines.device.recorded == passes
        assert engines.device.replayed >= passes * 8
    else:
        assert engines.device.recorded == engines.device.replayed == 0


def test_costs_are_taken_from_another_bundle_and_nothing_is_measured(
    tiny_export: Path, tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "open_engines", None)
    sizes = ["--k", "1,2,4,8", "--capacity", "160", "--max-prompt-chunk", "16"]
    for name in ("one", "two"):
        done = run_here("build-engine", tiny_export, "-o", tmp_path / name, *sizes, "--costs", tiny_bundle)
        assert done.returncode == 0, done.stderr
    given, one = read_manifest(tiny_bundle).build, read_manifest(tmp_path / "one").build
    assert given is not None
    assert one is not None
    assert (one.costs, one.acceptance) == (given.costs, given.acceptance)
    assert (tmp_path / "one" / "manifest.json").read_bytes() == (tmp_path / "two" / "manifest.json").read_bytes()


@pytest.mark.parametrize(
    ("costs", "sizes", "code", "message"),
    [
        ("tiny_export", ["--capacity", "160"], 2, "has no costs"),
        ("tiny_bundle", ["--capacity", "256"], 2, "do not include every pass"),
        ("tiny_bundle", ["--capacity", "160", "--k", "3"], 2, "do not include every pass"),
    ],
)
def test_costs_of_other_sizes_are_refused(
    request: pytest.FixtureRequest, tiny_export: Path, tmp_path: Path, costs: str, sizes: list[str], code: int, message: str
) -> None:
    given = request.getfixturevalue(costs)
    done = run_here("build-engine", tiny_export, "-o", tmp_path / "bundle", *sizes, "--costs", given)
    assert (done.returncode, message in done.stderr, done.stderr.count("\n")) == (code, True, 2), done.stderr
    assert list(tmp_path.iterdir()) == []
