"""Where `build-engine --stages` cuts a target, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.builder.stages import balanced
from outrider.bundle.folder import read_manifest
from outrider.tests.support import run_here


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
