"""What is chosen if the user does not: one rule for the backend, one for the sizes; and a backend that refuses gives way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outrider.backends import registry
from outrider.backends.build_spec import BuildSpec
from outrider.backends.onnxruntime.backend import OnnxRuntimeBackend
from outrider.builder.build import build_engine
from outrider.builder.defaults import BackendChoice, backends, capacity_and_batch, sequence_bytes
from outrider.bundle.folder import read_manifest
from outrider.bundle.manifest import Build, Manifest
from outrider.engines.contract import RecurrentLayer
from outrider.engines.device import Cpu
from outrider.errors import EngineError
from outrider.progress import Progress
from outrider.tests.support import build, ready_made


def with_target(manifest: Manifest, **changes: Any) -> Manifest:
    """Return a manifest with other values of its target."""
    target = msgspec.structs.replace(manifest.models["target"], **changes)
    return msgspec.structs.replace(manifest, models=manifest.models | {"target": target})


@pytest.mark.parametrize(
    ("changes", "machine", "installed", "expected"),
    [
        ({"parameters": 1_540_000_000}, "x86_64", True, ["openvino", "onnxruntime"]),
        ({"parameters": 1_540_000_000}, "x86_64 with AVX2", True, ["onnxruntime", "openvino"]),
        ({"parameters": 1_540_000_000}, "x86_64", False, ["onnxruntime"]),
        ({"parameters": 1_540_000_000}, "aarch64", True, ["onnxruntime", "openvino"]),
        ({"parameters": 135_000_000}, "x86_64", True, ["onnxruntime", "openvino"]),
        ({"parameters": 1_540_000_000, "recurrent": [RecurrentLayer(8, 3)]}, "x86_64", True, ["onnxruntime"]),
    ],
)
def test_the_backend_follows_from_the_models_and_the_machine(
    tiny_export: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    machine: str,
    installed: bool,
    expected: list[str],
) -> None:
    found = {"found": ["X86_V3", "AVX512_ICL"]} if machine == "x86_64" else {}
    monkeypatch.setattr("platform.machine", lambda: machine.partition(" ")[0])
    monkeypatch.setattr("numpy.show_config", lambda mode: {"SIMD Extensions": found})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    assert [choice.backend for choice in backends(with_target(read_manifest(tiny_export), **changes))] == expected


def test_the_caches_take_an_eighth_of_the_memory_and_half_of_what_the_weights_leave(tiny_export: Path) -> None:
    manifest = read_manifest(tiny_export)
    models = {role: msgspec.structs.replace(model, max_positions=None) for role, model in manifest.models.items()}
    unlimited = msgspec.structs.replace(manifest, models=models)
    whole, half = sequence_bytes(unlimited, 4096), sequence_bytes(unlimited, 2048)
    weights = sum(each.size for each in manifest.files.values())

    def chosen(room: int, capacity: int | None = None) -> tuple[int, int]:
        """Whichever of the two is less, and of either memory."""
        of_all, of_free = (10**15, 8 * room), (weights + 2 * room, 10**15)
        sizes = {capacity_and_batch(unlimited, memory, capacity) for memory in (of_all, of_free)}
        assert len(sizes) == 1
        return sizes.pop()

    assert chosen(10**11) == (4096, 4)
    assert chosen(3 * whole) == (4096, 2)
    assert chosen(whole) == (4096, 1)
    assert chosen(half) == (2048, 1)
    assert chosen(100) == (1024, 1)
    assert chosen(whole, capacity=2048) == (2048, 2)
    assert chosen(100, capacity=2048) == (2048, 1)
    assert capacity_and_batch(unlimited, (weights // 2, 10**15)) == (1024, 1)  # less is free than the weights take
    limit = min(model.max_positions for model in manifest.models.values() if model.max_positions)
    assert capacity_and_batch(manifest, (10**15, 10**15))[0] == min(limit, 4096)


def test_the_memory_is_what_the_system_and_the_container_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.engines.device.MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr("outrider.engines.device.CONTAINER", tmp_path)
    total = Cpu().memory()[1]
    (tmp_path / "meminfo").write_text("MemTotal:  9000000 kB\nMemFree:  10 kB\nMemAvailable:  70000 kB\nHugePages_Total:  0\n")
    assert Cpu().memory() == (70_000 * 1024, total)
    (tmp_path / "memory.max").write_text("max\n")  # no limit
    assert Cpu().memory() == (70_000 * 1024, total)
    (tmp_path / "memory.max").write_text("50000000\n")
    (tmp_path / "memory.current").write_text("40000000\n")
    (tmp_path / "memory.stat").write_text("anon 30000000\ninactive_file 5000000\n")
    assert Cpu().memory() == (15_000_000, 50_000_000)
    (tmp_path / "memory.max").write_text("20000000\n")
    assert Cpu().memory() == (0, 20_000_000)


class Refusing(OnnxRuntimeBackend):
    """Refuses every model."""

    name = "refusing"

    def build(self, spec: BuildSpec, folder: Path, progress: Progress) -> Build:
        raise EngineError("the target has a layer that refusing does not support", "choose another backend")


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Prefer a backend that refuses."""
    registry.register(Refusing())
    monkeypatch.setattr(
        "outrider.builder.build.backends", lambda _: [BackendChoice("refusing", ""), BackendChoice("onnxruntime", "")]
    )
    yield
    registry.unregister("refusing")


@pytest.mark.usefixtures("refusing")
def test_a_backend_that_refuses_gives_way_unless_it_was_asked_for(tiny_export: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"k": [1], "capacity": 64, "batch": 1, "max_prompt_chunk": 16}
    options["measured"] = ready_made(read_manifest(tiny_export), options)
    made = build_engine(tiny_export, tmp_path / "auto", backend="auto", **options).build
    assert made is not None
    assert made.backend == "onnxruntime"
    with pytest.raises(EngineError, match="refusing does not support"):
        build(tiny_export, tmp_path / "asked", backend="refusing")
    assert not (tmp_path / "asked").exists()
