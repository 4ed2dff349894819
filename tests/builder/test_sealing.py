"""What a bundle is sealed with: a backend that writes one file, over an export that holds no graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from outrider.backends import registry
from outrider.backends.base import Backend, Engines
from outrider.backends.build_spec import BuildSpec
from outrider.builder import build as build_module
from outrider.builder.build import build_engine, calibrate
from outrider.bundle.folder import read_manifest
from outrider.bundle.integrity import check_files
from outrider.bundle.manifest import MANIFEST, TOKENIZER, Build, Manifest
from outrider.engines.samplers import SAMPLERS
from outrider.errors import DeviceError, FolderError, OutriderError, UsageError
from outrider.progress import Progress
from outrider.runtime.text.text import Text
from outrider.tests.support import reseal, sealed_bundle


class Writing(Backend):
    """Writes the tokenizer and a plan."""

    name = "writing"
    requires_costs = False

    def __init__(self) -> None:
        self.specs: list[BuildSpec] = []
        self.error: Exception | None = None

    def build(self, spec: BuildSpec, folder: Path, progress: Progress) -> Build:
        self.specs.append(spec)
        if self.error is not None:
            raise self.error
        spec.copy_except(spec.manifest.engines, folder, progress)
        (folder / "plan").write_text("a plan")
        return spec.result(self.name, "1", "cpu")

    def open(self, folder: Path, manifest: Manifest, build: Build, device: str | None) -> Engines:
        raise NotImplementedError

    def engine_files(self, name: str) -> tuple[str, ...]:
        return ("plan",)


@pytest.fixture
def backend() -> Iterator[Writing]:
    made = Writing()
    registry.register(made)
    yield made
    registry.unregister(made.name)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """What passes cost and what is accepted, in place of measuring it; an exception is raised."""
    known = read_manifest(sealed_bundle(tmp_path / "known")).build
    assert known is not None
    results = SimpleNamespace(costs=known.costs, acceptance={"model": 0.25}, asked=[])

    def result(name: str) -> Any:
        def of(*_: object, **how: object) -> Any:
            results.asked.append(how)
            value = getattr(results, name)
            if isinstance(value, Exception):
                raise value
            return value

        return of

    monkeypatch.setattr(build_module, "open_engines", lambda *_: None)
    monkeypatch.setattr(build_module, "Outrider", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(Text, "load", lambda *_: None)
    monkeypatch.setattr(build_module, "measure", result("costs"))
    monkeypatch.setattr(build_module, "measure_acceptance", result("acceptance"))
    return results


@pytest.fixture
def export(tmp_path: Path) -> Path:
    made = sealed_bundle(tmp_path / "export")
    reseal(made, build=None)
    return made


def built(export: Path, output: Path, **options: Any) -> Manifest:
    usual: dict[str, Any] = {"backend": "writing", "k": [2, 1, 2], "batch": 1, "capacity": 128}
    return build_engine(export, output, **(usual | options))


def test_a_bundle_has_what_was_built_and_measured(backend: Writing, measured: Any, export: Path, tmp_path: Path) -> None:
    made = built(export, tmp_path / "bundle", max_prompt_chunk=16)
    assert read_manifest(tmp_path / "bundle") == made
    check_files(tmp_path / "bundle", made)
    assert made.files.keys() == {TOKENIZER, "plan"}
    assert made.build is not None
    assert (made.build.k, made.build.capacity, made.build.windows) == ([1, 2], 128, [64, 128])
    assert (made.build.costs, made.build.acceptance) == (measured.costs, {"model": 0.25})
    assert {"target", "draft", *SAMPLERS} == {*measured.costs}
    assert measured.asked == [{"few": True}, {"fit": True}]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["bundle", "export", "known"]
    small = built(export, tmp_path / "small", capacity=None).build
    assert small is not None
    assert (small.capacity, small.max_prompt_chunk) == (256, 64)  # what the models support


def test_sizes_that_do_not_fit_are_refused_before_anything_is_built(
    backend: Writing, measured: Any, export: Path, tmp_path: Path
) -> None:
    for options, message in (
        ({"k": []}, "k is empty"),
        ({"k": [0, 4]}, "each must be at least 1"),
        ({"batch": 0}, "batch is 0"),
        ({"k": [8], "capacity": 9}, "does not hold k = 8"),
        ({"capacity": 257}, "supports 256 positions"),
        ({"max_prompt_chunk": 129}, "prompt chunk of 129"),
        ({"device": "gpu"}, "--device does not apply"),
        ({"options": {"precise": 1}}, "--precise does not apply"),
        ({"backend": "another"}, "there is no backend"),
    ):
        with pytest.raises(UsageError, match=message):
            built(export, tmp_path / "bundle", **options)
    assert not backend.specs
    assert not (tmp_path / "bundle").exists()


def test_a_failure_leaves_no_bundle(backend: Writing, measured: Any, export: Path, tmp_path: Path) -> None:
    for error in (OutriderError("no", "no"), OSError(28, "No space left on device"), KeyboardInterrupt()):
        backend.error = error  # type: ignore[assignment]
        with pytest.raises((OutriderError, KeyboardInterrupt)):
            built(export, tmp_path / "bundle")
        assert sorted(each.name for each in tmp_path.iterdir()) == ["export", "known"]
    backend.error = None
    (export / "target" / "model.onnx").write_text("other")
    with pytest.raises(FolderError, match=r"target/model\.onnx"):
        built(export, tmp_path / "bundle")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["export", "known"]


def test_what_this_machine_cannot_run_is_sealed_without_costs_where_the_backend_allows_it(
    backend: Writing, measured: Any, export: Path, tmp_path: Path
) -> None:
    measured.costs = DeviceError("there is no GPU", "use another machine")
    made = built(export, tmp_path / "bundle").build
    assert made is not None
    assert (made.costs, made.acceptance) == ({}, {})
    backend.requires_costs = True
    with pytest.raises(DeviceError):
        built(export, tmp_path / "other")


def test_costs_are_sealed_where_the_acceptance_cannot_be_measured(
    backend: Writing, measured: Any, export: Path, tmp_path: Path
) -> None:
    for number, error in enumerate((OutriderError("no prompt fits", "none"), MemoryError())):
        measured.acceptance = error
        made = built(export, tmp_path / f"bundle{number}").build
        assert made is not None
        assert (made.costs, made.acceptance) == (measured.costs, {})


def test_calibrating_replaces_what_was_measured_and_nothing_else(measured: Any, tmp_path: Path) -> None:
    bundle = sealed_bundle(tmp_path / "bundle")
    before = read_manifest(bundle)
    assert before.build is not None
    measured.costs = {
        name: [msgspec.structs.replace(each, runs=3) for each in some] for name, some in before.build.costs.items()
    }
    after = calibrate(bundle)
    assert measured.asked == [{"few": False}, {"fit": False}]
    assert read_manifest(bundle) == after
    want = msgspec.structs.replace(before.build, costs=measured.costs, acceptance={"model": 0.25})
    assert after == msgspec.structs.replace(before, build=want)
    written = (bundle / MANIFEST).read_bytes()
    measured.costs = OutriderError("the engine does not run", "none")
    with pytest.raises(OutriderError):
        calibrate(bundle)
    assert (bundle / MANIFEST).read_bytes() == written


def test_a_damaged_bundle_is_not_calibrated(measured: Any, tmp_path: Path) -> None:
    bundle = sealed_bundle(tmp_path / "bundle")
    path, written = bundle / "target" / "model.onnx", (bundle / MANIFEST).read_bytes()
    path.write_text(path.read_text()[::-1])
    with pytest.raises(FolderError, match="is not the file that was sealed"):
        calibrate(bundle)
    assert (bundle / MANIFEST).read_bytes() == written


def test_an_export_that_changes_while_it_is_built_gives_no_bundle(
    backend: Writing, measured: Any, export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = BuildSpec.copy_except

    def swapped(self: BuildSpec, *rest: Any) -> None:
        copy(self, *rest)
        (export / TOKENIZER).write_text("other")

    monkeypatch.setattr(BuildSpec, "copy_except", swapped)
    with pytest.raises(FolderError, match="was changed or replaced while it was being read"):
        built(export, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
