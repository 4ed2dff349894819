"""A draft model on another device than the target: its drafts and the texts are those of one device."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from outrider.backends.open import open_bundle
from outrider.bundle.folder import read_manifest
from outrider.bundle.manifest import MANIFEST
from outrider.engines.device import Buffer, Device, Launch
from outrider.engines.staged_session import StagedSession
from outrider.runtime.generation import Outrider
from outrider.tests.deferred import Deferred, deferred
from outrider.tests.runtime.local_stages import LocalStages
from outrider.tests.runtime.stages import CAPACITY, CHUNK, PROMPTS, SLOTS, K, alone, at_once, results, together
from outrider.tests.support import Made, build, run_here

SIZES = {"k": [*K], "capacity": CAPACITY, "batch": SLOTS, "max_prompt_chunk": CHUNK}


class Placed(NamedTuple):
    """Where a bundle runs; the tests' pair, or its target with a parallel draft."""

    options: dict[str, Any]
    draft: str | None
    role: str = "draft"


PLACES = {
    "beside the first stage": Placed({"stages": "2", "stage_devices": ("cuda:0", "cuda:1")}, "cuda:0"),
    "on a device of its own": Placed({"device": "cuda"}, "cuda:1"),
    "a third GPU": Placed({"stages": "2", "stage_devices": ("cuda:0", "cuda:1")}, "cuda:2"),
    "on the CPU": Placed({"device": "cuda"}, "cpu"),
    "the target on the CPU": Placed({}, "cuda:0"),
    "a parallel draft": Placed({"device": "cuda"}, "cuda:1", "parallel-draft"),
}
QUICK = ("beside the first stage", "on the CPU")


@pytest.fixture(scope="module")
def loaded(
    trained_exports: Callable[[str], Path],
    drafter_exports: Callable[[str, str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Made[Outrider]:
    """Each bundle, and the same models on one device by the name of their draft."""
    folder = tmp_path_factory.mktemp("drafts")

    def make(name: str) -> Outrider:
        placed = PLACES.get(name) or Placed({"device": "cuda"}, None, name)
        source = trained_exports("fp32") if placed.role == "draft" else drafter_exports("fp32", "trained parallel")
        return deferred(build(source, folder / name, draft_device=placed.draft, **placed.options, **SIZES), slots=SLOTS)

    return Made(make)


@pytest.fixture(params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PLACES])
def both(request: pytest.FixtureRequest, loaded: Made[Outrider]) -> tuple[Outrider, Outrider, Placed]:
    placed = PLACES[request.param]
    return loaded[placed.role], loaded[request.param], placed


def accepted(outrider: Outrider) -> list[int]:
    """How many drafted tokens each answer has."""
    drafter, answers = outrider.drafters[0], []
    for prompt in PROMPTS:
        *_, last = outrider.generate(prompt, k=4, drafter=drafter)
        answers.append(last.stats.accepted)
    return answers


def test_a_draft_elsewhere_computes_the_same_bits(both: tuple[Outrider, Outrider, Placed]) -> None:
    """In every pass, and in its caches, also after copies; on the device that it was given."""
    one, other, placed = both
    session = other.engines.session(placed.role, SLOTS)
    assert isinstance(session, StagedSession)
    assert session.device is other.engines.device
    assert session.stages[0].device is other.engines.others[str(placed.draft)].device
    assert session.stages[0].device.stream != session.device.stream
    got, want = ([*map(np.array, results(each))] for each in (session, one.engines.session(placed.role, SLOTS)))
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_drafts_and_texts_are_those_of_one_device(both: tuple[Outrider, Outrider, Placed]) -> None:
    """Greedy and sampled, free and under grammars, alone and together."""
    one, other, placed = both
    want = alone(one, 0, None, 16)
    assert alone(other, 4, other.drafters[0], 16) == want
    assert alone(other, "auto", None, 16) == want
    assert together(other, "auto") == together(one, 0)
    assert accepted(other) == accepted(one)
    assert sum(accepted(one)) > 20
    assert bool(other.rounds.recorder.recorded) == ("cpu" not in (placed.draft, other.build.device))


@pytest.mark.slow
def test_a_draft_may_be_on_a_device_while_stages_are_in_other_processes(
    loaded: Made[Outrider], trained_exports: Callable[[str], Path], tmp_path: Path
) -> None:
    """Alone and in halves that alternate."""
    bundle = build(trained_exports("fp32"), tmp_path / "bundle", stages="2", draft_device="cuda:0", **SIZES)
    one, stages = loaded["draft"], LocalStages()
    other = deferred(bundle, slots=SLOTS, elsewhere=stages)
    want = alone(one, 0, None, 12)
    assert alone(other, 4, other.drafters[0], 12) == want
    assert at_once(other, 4, 12) == want
    assert accepted(other) == accepted(one)
    assert stages.chains[0].overlapping


def test_copies_that_do_not_wait_change_what_is_drafted(loaded: Made[Outrider], monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above. Texts stay the target's, whatever is drafted."""

    def receive(self: Deferred, target: Buffer, source: Buffer, sender: Device) -> Launch:
        return self.deferred(lambda: np.copyto(target.view(), source.view()))

    one, folder = loaded["draft"], loaded["on a device of its own"].engines.folder
    monkeypatch.setattr(Deferred, "receive", receive)
    hasty = deferred(folder, slots=SLOTS)
    assert accepted(hasty) != accepted(one)
    assert alone(hasty, 4, hasty.drafters[0], 8) == alone(one, 0, None, 8)


def test_a_bundle_shows_the_device_of_its_draft_and_forgets_it_with_another_device(
    loaded: Made[Outrider], tmp_path: Path
) -> None:
    bundle = Path(shutil.copytree(loaded["the target on the CPU"].engines.folder, tmp_path / "bundle"))
    _, made = open_bundle(bundle)
    assert made.draft_device == "cuda:0"
    assert "cuda:0" in next(
        line for line in run_here("inspect", bundle).stdout.splitlines() if "device of draft models" in line
    )
    done = run_here("generate", bundle, "--prompt", "a")
    assert done.returncode == 1
    assert "no NVIDIA GPU found" in done.stderr or "cuda-bindings cannot be imported" in done.stderr
    assert run_here("generate", bundle, "--prompt", "a", "--max-new-tokens", "3", "--device", "cpu").returncode == 0
    assert run_here("calibrate", bundle, "--device", "cpu").returncode == 0
    assert read_manifest(bundle).build.draft_device is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--backend", "onnxruntime", "--draft-device", "gpu"), "onnxruntime has no device 'gpu' for drafts"),
        (("--backend", "openvino", "--draft-device", "cuda:0"), "openvino has no device 'cuda:0' for drafts"),
    ],
)
def test_devices_that_do_not_fit_are_refused(tiny_export: Path, tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    done = run_here("build-engine", tiny_export, "-o", tmp_path / "bundle", *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "bundle").exists()


def test_a_bundle_without_a_draft_model_is_refused(tiny_export: Path, tmp_path: Path) -> None:
    """A draft head runs beside its target."""
    export = Path(shutil.copytree(tiny_export, tmp_path / "export"))
    manifest = read_manifest(export)
    lonely = msgspec.structs.replace(manifest, models={"target": manifest.models["target"]})
    (export / MANIFEST).write_bytes(lonely.encode())
    done = run_here("build-engine", export, "-o", tmp_path / "bundle", "--draft-device", "cuda:0")
    assert done.returncode == 2
    assert "--draft-device is for draft models, and the export has none" in done.stderr


def test_the_device_of_the_target_is_no_other_one(tiny_export: Path, tmp_path: Path) -> None:
    made = read_manifest(build(tiny_export, tmp_path / "bundle", draft_device="cpu")).build
    assert made is not None
    assert made.draft_device is None
