"""A backend is one class and one call of `register`: the toy in `toy.py` goes through every stage, and nothing knows of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.audit.engine_checks import compare_engines
from outrider.backends import registry
from outrider.backends.base import Engines
from outrider.backends.open import open_bundle, open_engines
from outrider.bundle.folder import read_manifest
from outrider.bundle.manifest import Build, Manifest
from outrider.errors import DeviceError, EngineError, UsageError
from outrider.progress import Progress
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.tests.backends.toy import Toy
from outrider.tests.support import build

COMMANDS = """
import json, sys
from click.testing import CliRunner
from outrider.backends import registry
from outrider.tests.backends.toy import Toy
registry.register(Toy())
from outrider.cli import main
done = [CliRunner().invoke(main, command) for command in json.loads(sys.argv[1])]
print(json.dumps([(each.exit_code, each.stdout, each.stderr) for each in done]))
"""  # in a process where the toy is known before the commands are


class Elsewhere(Toy):
    """Runs on another machine only."""

    name = "elsewhere"

    def open(self, folder: Path, manifest: Manifest, build: Build, device: str | None) -> Engines:
        raise DeviceError("no abacus found", "buy one")


class Broken(Toy):
    """Runs nowhere."""

    name = "broken"

    def open(self, folder: Path, manifest: Manifest, build: Build, device: str | None) -> Engines:
        raise EngineError("the beads are stuck", "shake it")


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    backends = Toy(), Elsewhere(), Broken()
    for backend in backends:
        registry.register(backend)
    yield
    for backend in backends:
        registry.unregister(backend.name)


@pytest.fixture(scope="module")
def toy_bundle(tiny_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tiny_export, tmp_path_factory.mktemp("toy") / "bundle", backend="toy", k=[1, 4])


def greedy(bundle: Path, k: int) -> list[int]:
    with Outrider.load(bundle) as outrider:
        events = outrider.generate("the quick brown fox", SamplingParams(max_new_tokens=24), k=k)
        return [token for event in events for token in event.token_ids]


@pytest.mark.parametrize("k", [0, 4])
def test_its_text_equals_onnx_runtimes(toy_bundle: Path, tiny_bundle: Path, k: int) -> None:
    assert greedy(toy_bundle, k) == greedy(tiny_bundle, 0)


def test_its_costs_are_measured_and_checked(toy_bundle: Path) -> None:
    manifest, made = open_bundle(toy_bundle)
    assert (made.backend, made.device) == ("toy", "cpu")
    assert set(made.costs) == set(manifest.engines)


def test_verify_compares_its_engines(tiny_export: Path, tmp_path: Path) -> None:
    bundle = build(tiny_export, tmp_path / "bundle", backend="toy", k=[1], capacity=64, max_prompt_chunk=16)
    compared = list(compare_engines(open_engines(bundle, *open_bundle(bundle)), tiny_export))
    assert {each.engine for each in compared} == set(read_manifest(bundle).engines)
    assert all(each.passed for each in compared)


def test_the_command_line_offers_it_and_its_options(tiny_export: Path, tmp_path: Path) -> None:
    sizes = ("--k", "1", "--capacity", "64", "--max-prompt-chunk", "16")
    build_it = ("build-engine", tiny_export, "--backend", "toy", *sizes)
    commands = (
        ("build-engine", "--help"),
        (*build_it, "-o", tmp_path / "bundle", "--greeting", "an abacus"),
        ("generate", tmp_path / "bundle", "--prompt", "the quick", "--max-new-tokens", "4"),
        (*build_it, "-o", tmp_path / "other", "--workspace", "1"),
    )
    given = json.dumps([[*map(str, command)] for command in commands])
    done = subprocess.run([sys.executable, "-c", COMMANDS, given], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown, built, told, refused = json.loads(done.stdout.splitlines()[-1])
    assert "onnxruntime|openvino|tensorrt-rtx|tensorrt|toy" in shown[1].replace("\n", "")
    assert "Backend toy:\n  --greeting" in shown[1]
    assert built[0] == 0, built
    assert "an abacus" in built[1]
    assert told[0] == 0, told
    assert (refused[0], "--workspace does not apply to the backend toy" in refused[2]) == (2, True)


def test_names_are_taken_once_and_unknown_ones_refused(tiny_export: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="already a backend called 'toy'"):
        registry.register(Toy())
    with pytest.raises(UsageError, match="no backend 'abacus'") as caught:
        build(tiny_export, tmp_path / "bundle", backend="abacus")
    assert "onnxruntime" in caught.value.hint


class Stages(Progress):
    def __init__(self) -> None:
        self.names: list[str] = []

    def stage(self, name: str, total: int | None = None) -> None:
        self.names.append(name)


def test_a_machine_that_cannot_run_the_engines_may_build_them(tiny_export: Path, tmp_path: Path) -> None:
    stages = Stages()
    made = read_manifest(build(tiny_export, tmp_path / "bundle", backend="elsewhere", k=[1], progress=stages)).build
    assert made is not None
    assert made.costs == {}
    assert "could not measure costs, because this machine cannot run the engines (no abacus found)" in stages.names


def test_engines_that_do_not_work_fail_the_build(tiny_export: Path, tmp_path: Path) -> None:
    """A defect is not taken for a machine without the device."""
    with pytest.raises(EngineError, match="the beads are stuck"):
        build(tiny_export, tmp_path / "bundle", backend="broken", k=[1])
    assert list(tmp_path.iterdir()) == []
