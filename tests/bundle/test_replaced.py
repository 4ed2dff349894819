"""A folder that is replaced or changed while it is being read is refused: engines and digests belong to the same files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.builder.build import build_engine, calibrate
from outrider.bundle.folder import read_manifest
from outrider.errors import FolderError
from outrider.export.pair import export_pair
from outrider.progress import Progress
from outrider.runtime.generation import Outrider
from outrider.runtime.scheduler import Scheduler
from outrider.serve.engine import EngineThread
from outrider.serve.metrics import Metrics
from outrider.tests.support import build, llama, write_checkpoint

PROMPT = "the quick brown fox"
REPLACED = "was changed or replaced while it was being read"


class Hook(Progress):
    """Calls a function once, when the last digest of a folder has been taken."""

    def __init__(self, then: Callable[[], object]):
        self._then: Callable[[], object] | None = then
        self._left = 0

    def stage(self, name: str, total: int | None = None) -> None:
        self._left = total if total is not None and name.startswith("checking every file") else 0

    def advance(self, size: int) -> None:
        self._left -= size
        if self._left == 0 and self._then is not None:
            then, self._then = self._then, None
            then()


@pytest.fixture(scope="module")
def other_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export whose target answers differently from the tiny pair's, with the same sizes."""
    folder = tmp_path_factory.mktemp("other")
    models = (write_checkpoint(folder / f"checkpoint-{seed}", llama(seed, num_hidden_layers=3 - seed)) for seed in (1, 2))
    target, draft = (str(path) for path in models)
    export_pair(target, draft, folder / "onnx", precision="fp32")
    return folder / "onnx"


@pytest.fixture(scope="module")
def other_bundle(other_export: Path) -> Path:
    return build(other_export, other_export.parent / "bundle")


@pytest.fixture
def copy(tiny_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


def text(bundle: Path) -> str:
    return "".join(event.text for event in Outrider.load(bundle).generate(PROMPT, k=0))


def swap(folder: Path, other: Path) -> None:
    """Put a copy of another folder into a folder's place, by renaming."""
    incoming = shutil.copytree(other, folder.with_name("incoming"))
    folder.rename(folder.with_name("outgoing"))
    incoming.rename(folder)


def there_and_back(folder: Path) -> None:
    folder.rename(folder.with_name("away"))
    folder.with_name("away").rename(folder)


def replace_weights(folder: Path, other: Path) -> None:
    incoming = shutil.copy(other / "target" / "model.onnx.data", folder.with_name("incoming"))
    os.replace(incoming, folder / "target" / "model.onnx.data")


def write_weights(folder: Path, other: Path) -> None:
    (folder / "target" / "model.onnx.data").write_bytes((other / "target" / "model.onnx.data").read_bytes())


@pytest.mark.parametrize("change", [swap, lambda folder, _: there_and_back(folder), replace_weights, write_weights])
def test_a_bundle_that_changes_between_its_digests_and_its_engines_is_refused(
    copy: Path, other_bundle: Path, change: Callable[[Path, Path], None]
) -> None:
    with pytest.raises(FolderError, match=REPLACED):
        Outrider.load(copy, Hook(lambda: change(copy, other_bundle)))


def test_a_link_to_a_bundle_may_be_turned_to_another_at_any_time(copy: Path, other_bundle: Path) -> None:
    """The bundle that it led to at first is loaded."""
    current = copy.with_name("current")
    current.symlink_to(copy)

    def turn() -> None:
        copy.with_name("next").symlink_to(other_bundle)
        copy.with_name("next").rename(current)

    loaded = Outrider.load(current, Hook(turn))
    assert "".join(event.text for event in loaded.generate(PROMPT, k=0)) == text(copy) != text(other_bundle)
    assert text(current) == text(other_bundle)


def test_an_export_that_is_replaced_while_it_is_built_gives_no_bundle(
    tiny_export: Path, other_export: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(tiny_export, tmp_path / "onnx"))
    sizes = {"k": [1], "batch": 1, "capacity": 64}
    with pytest.raises(FolderError, match=REPLACED):
        hook = Hook(lambda: swap(source, other_export))
        build_engine(source, tmp_path / "out", backend="onnxruntime", progress=hook, **sizes)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_costs_are_not_written_into_a_bundle_that_was_not_measured(copy: Path, other_bundle: Path) -> None:
    with pytest.raises(FolderError, match=REPLACED):
        calibrate(copy, Hook(lambda: swap(copy, other_bundle)))
    assert read_manifest(copy) == read_manifest(other_bundle)


def test_a_server_does_not_watch_another_bundle_than_it_loaded(copy: Path, other_bundle: Path) -> None:
    def load() -> Scheduler:
        swap(copy, other_bundle)
        return Scheduler(Outrider.load(copy))

    engine = EngineThread(copy, load, Metrics(), timeout=60)
    engine.start()
    assert engine.loaded.wait(60)
    assert "was replaced while it was being loaded" in str(engine.failure)


SWAPPER = """
import os, random, sys, time
one, two, away = sys.argv[1:]
print("swapping", flush=True)
while True:
    for source, destination in ((one, away), (two, one), (away, two)):
        os.rename(source, destination)
    time.sleep(random.choice((0, 0.01, 0.1, 1)))
"""


def test_loading_while_a_process_swaps_two_bundles_never_mixes_them(copy: Path, other_bundle: Path, tmp_path: Path) -> None:
    expected = {text(copy), text(other_bundle)}
    assert len(expected) == 2
    two = shutil.copytree(other_bundle, tmp_path / "two")
    answers, errors = set[str](), list[str]()
    command = [sys.executable, "-c", SWAPPER, str(copy), str(two), str(tmp_path / "away")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as swapper:
        assert swapper.stdout is not None
        swapper.stdout.readline()
        for _ in range(30):
            try:
                answers.add(text(copy))
            except FolderError as error:
                errors.append(str(error))
        swapper.kill()
    assert answers <= expected
    assert all(REPLACED in error or "neither an export nor a bundle" in error for error in errors)
    assert answers  # it pauses now and then
