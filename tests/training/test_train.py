"""`outrider train-draft` from texts to a draft that is served: real runs, interrupted and not."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.bundle.folder import read_manifest
from outrider.export.pair import export_pair
from outrider.tests.support import COMMAND, PAIR, llama, run, write_checkpoint

SHORT = (
    "--max-length",
    "96",
    "--max-new-tokens",
    "32",
    "--epochs",
    "1",
    "--draft-vocab",
    "512",
    "--k",
    "3",
    "--precision",
    "fp32",
)
TEXTS = ("--text", PAIR / "heldout.jsonl")


@pytest.fixture(scope="module")
def answering(shipped_bundles: Callable[..., Path]) -> Path:
    return shipped_bundles(capacity=128, batch=8)


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("pard", marks=pytest.mark.slow)])
def test_a_draft_is_trained_served_and_exported(kind: str, answering: Path, tmp_path: Path) -> None:
    start = {"eagle3": ("--from", PAIR / "head"), "pard": ("--from", PAIR / "draft")}[kind]
    output = tmp_path / "draft"
    done = run(
        *("train-draft", "--target", PAIR / "target", "--kind", kind, *TEXTS, "-o", output, "--bundle", answering),
        *(*SHORT, *start, "--json"),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    served = report["mean_acceptance_length"]
    assert served > (1.5 if kind == "eagle3" else 1.05)
    assert abs(served / report["mean_acceptance_length_in_training"] - 1) < 0.02  # fp32: the same but for near-ties
    assert {"loss", "length"} <= {key for entry in report["history"] for key in entry}
    assert {"config.json", "model.safetensors", "README.md", "training.json", "training.svg"} <= {
        path.name for path in output.iterdir()
    }
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]  # what a run goes on from is gone
    models = export_pair(str(PAIR / "target"), str(output), tmp_path / "onnx", precision="fp32").models
    assert models.keys() == {"target", "head" if kind == "eagle3" else "parallel-draft"}


def test_a_new_head_goes_on_after_an_interrupt(answering: Path, tmp_path: Path) -> None:
    """Killed while it trains; the second run neither answers again nor begins anew."""
    output, work = tmp_path / "head", tmp_path / ".head.training"
    command: list[str | Path] = [
        *("train-draft", "--target", PAIR / "target", "--kind", "eagle3", *TEXTS, "-o", output, "--bundle", answering),
        *(*SHORT, "--epochs", "6", "--batch", "2"),
    ]
    with subprocess.Popen([*COMMAND, *map(str, command)], stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 300
        while not list(work.glob("checkpoints-*/checkpoint-*/trainer_state.json")) and time.monotonic() < deadline:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
        process.kill()
    assert not output.exists()
    answers = (work / "answers.jsonl").read_bytes()
    with open(work / "answers.jsonl", "ab") as file:
        file.write(b'["half a li')  # as a killed run may leave it
    checkpoints = sorted(path.name for path in work.glob("checkpoints-*/checkpoint-*"))
    done = run(*command, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    first = min(entry["step"] for entry in report["history"] if "length" in entry)
    assert int(checkpoints[0].split("-")[1]) >= first  # what was measured before the interrupt is in the report
    lengths = [entry["length"] for entry in report["history"] if "length" in entry]
    assert lengths[-1] > lengths[0]
    assert answers
    assert not work.exists()


@pytest.mark.parametrize(
    ("options", "message", "code"),
    [
        (("--kind", "pard"), "a parallel draft is made of a small model", 2),
        (("--kind", "eagle3", "--k", "0"), "k is 0", 2),
        (("--kind", "eagle3", "--max-length", "8"), "max_length is 8", 2),
        (("--kind", "eagle3", "--learning-rate", "-1"), "learning_rate is -1", 2),
        (("--kind", "eagle3", "--from", "/nowhere/x"), "/nowhere/x does not exist", 1),
    ],
)
def test_wrong_options_are_refused_before_anything_is_done(
    options: tuple[str, ...], message: str, code: int, tmp_path: Path
) -> None:
    done = run("train-draft", "--target", PAIR / "target", *TEXTS, "-o", tmp_path / "draft", *options)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_loss_that_is_not_finite_ends_the_run(answering: Path, tmp_path: Path) -> None:
    done = run(
        *("train-draft", "--target", PAIR / "target", "--kind", "eagle3", *TEXTS, "-o", tmp_path / "head"),
        *("--bundle", answering, *SHORT, "--learning-rate", "1e30", "--epochs", "3"),
    )
    assert done.returncode == 1
    assert "the loss is nan" in done.stderr
    assert "--learning-rate" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "head").exists()


def test_a_bundle_of_another_target_is_refused(answering: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", llama())
    done = run(
        *("train-draft", "--target", other, "--kind", "eagle3", *TEXTS, "-o", tmp_path / "head", "--bundle", answering, *SHORT)
    )
    assert done.returncode == 2
    assert "has another tokenizer than" in done.stderr
    assert read_manifest(answering).roles == ("target", "draft")
