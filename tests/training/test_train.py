"""`outrider train-draft` from texts to a draft that is served: real runs, interrupted and not."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from outrider.bundle.folder import read_manifest
from outrider.errors import ParityError, UnsupportedModelError, UsageError
from outrider.export.checkpoints.checkpoint import load_model
from outrider.export.checkpoints.source import Source
from outrider.runtime.stats import Stats
from outrider.tests.export.test_lora import write_ones
from outrider.tests.support import COMMAND, PAIR, SHIPPED, full_disk, llama, run_here, write_checkpoint
from outrider.training.answers import Example
from outrider.training.arguments import TrainingArguments, TrainingOptions
from outrider.training.eagle3 import Eagle3Objective, new_config, open_head
from outrider.training.train import check_served, check_target

SHORT = ("--max-length=96", "--max-new-tokens=32", "--epochs=1", "--draft-vocab=512", "--k=3", "--precision=fp32")
HEAD = ("--kind", "eagle3", "--from", PAIR / "head")
PROMPTS = 60  # one in twenty is held out, and served in enough rounds to be compared


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The option that names some of the shipped pair's prompts."""
    return "--text", first_prompts(tmp_path_factory.mktemp("texts") / "texts.jsonl", PROMPTS)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The option that names as few as there must be: for runs that end before anything is compared."""
    return "--text", first_prompts(tmp_path_factory.mktemp("few") / "texts.jsonl", 48)


def first_prompts(path: Path, count: int) -> Path:
    path.write_text("".join((SHIPPED / "heldout.jsonl").read_text().splitlines(keepends=True)[:count]))
    return path


@pytest.fixture(scope="module")
def answering(trained_bundles: Callable[..., Path]) -> Path:
    return trained_bundles(capacity=128, batch=8)


@pytest.mark.slow  # tests/training/test_loop.py has what is learned and how, of a bundle's answers as well
@pytest.mark.parametrize("kind", ["eagle3", "pard"])
def test_a_draft_is_trained_and_served(kind: str, answering: Path, texts: tuple[str, Path], tmp_path: Path) -> None:
    start = {"eagle3": ("--from", PAIR / "head"), "pard": ("--from", PAIR / "draft")}[kind]
    output = tmp_path / "draft"
    done = run_here(
        *("train-draft", "--target", PAIR / "target", "--kind", kind, *texts, "-o", output, "--bundle", answering),
        *(*SHORT, *start, "--json"),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    served = report["mean_acceptance_length"]
    assert served > (1.5 if kind == "eagle3" else 1.05)
    assert abs(served / report["mean_acceptance_length_in_training"] - 1) < 0.02  # fp32: the same but for near-ties
    assert {"loss", "mean_acceptance_length"} <= {key for entry in report["history"] for key in entry}
    assert {"config.json", "model.safetensors", "README.md", "training.json"} <= {path.name for path in output.iterdir()}
    assert "| update | loss |" in (output / "README.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]  # the files for resuming a run are gone
    assert Source.parse(str(output)).drafting_role() == ("head" if kind == "eagle3" else "parallel-draft")


@pytest.mark.slow  # tests/training/test_loop.py interrupts what it does
def test_a_new_head_is_resumed_after_an_interrupt(texts: tuple[str, Path], tmp_path: Path) -> None:
    """Killed while it trains; the second run neither answers again nor starts over."""
    output, work = tmp_path / "head", tmp_path / ".head.training"
    command: list[str | Path] = [
        *("train-draft", "--target", SHIPPED / "target", "--kind", "eagle3", *texts, "-o", output),
        *(*SHORT, "--epochs", "2", "--batch", "2"),
    ]
    with subprocess.Popen([*COMMAND, *map(str, command)], stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 300
        while not list(work.glob("checkpoints-*/checkpoint-*/trainer_state.json")) and time.monotonic() < deadline:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
        process.kill()
    assert not output.exists()
    with open(work / "answers.jsonl", "ab") as file:
        file.write(b'["half a li')  # as a killed run may leave it
    (folder,) = work.glob("checkpoints-*")
    at = max(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*") if (path / "trainer_state.json").exists())
    state = json.loads((folder / f"checkpoint-{at}" / "trainer_state.json").read_text())
    state["log_history"].append({"step": 0, "loss": 77.0})  # only a run that resumes here knows of it
    (folder / f"checkpoint-{at}" / "trainer_state.json").write_text(json.dumps(state))
    done = run_here(*command, "--json")
    assert done.returncode == 0, done.stderr
    assert "generating answers" not in done.stderr
    history = json.loads(done.stdout)["history"]
    assert {"step": 0, "loss": 77.0} in history
    lengths = [entry["mean_acceptance_length"] for entry in history if "mean_acceptance_length" in entry]
    assert lengths[-1] > lengths[0]
    assert not work.exists()


@pytest.mark.parametrize(
    ("options", "message", "code"),
    [
        (("--kind", "pard"), "a parallel draft starts from a small model", 2),
        (("--kind", "eagle3", "--k", "0"), "k is 0", 2),
        (("--kind", "eagle3", "--max-length", "8"), "max_length is 8", 2),
        (("--kind", "eagle3", "--learning-rate", "-1"), "learning_rate is -1", 2),
        (("--kind", "eagle3", "--epochs", "inf"), "epochs is inf", 2),
        (("--kind", "eagle3", "--learning-rate", "nan"), "learning_rate is nan", 2),
        (("--kind", "eagle3", "--temperature", "-1"), "temperature", 2),
        (("--kind", "eagle3", "--seed", "-1"), "seed is -1", 2),
        (("--kind", "eagle3", "--k", "1000"), "k is 1000", 2),
        (("--kind", "eagle3", "--from", "/nowhere/x"), "/nowhere/x does not exist", 1),
        (("--kind", "eagle3", "--from", PAIR / "draft"), "draft is a draft", 2),
        (("--kind", "pard", "--from", PAIR / "head"), "head is a head", 2),
        (("--kind", "eagle3", "--lora", PAIR / "draft"), "draft has no adapter_config.json", 1),
    ],
)
def test_wrong_options_are_refused_before_anything_is_done(
    options: tuple[str | Path, ...], message: str, code: int, texts: tuple[str, Path], tmp_path: Path
) -> None:
    arguments = ("train-draft", "--target", PAIR / "target", *texts, "-o", tmp_path / "draft", *options)
    done = run_here(*arguments)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_loss_that_is_not_finite_ends_the_run(answering: Path, few: tuple[str, Path], tmp_path: Path) -> None:
    done = run_here(
        *("train-draft", "--target", PAIR / "target", *HEAD, *few, "-o", tmp_path / "head"),
        *("--bundle", answering, *SHORT, "--learning-rate", "1e30", "--epochs", "3"),
    )
    assert done.returncode == 1
    assert "the loss is nan" in done.stderr
    assert "--learning-rate" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "head").exists()


def test_a_bundle_of_another_target_is_refused(answering: Path, texts: tuple[str, Path], tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", llama(num_hidden_layers=3))
    done = run_here(
        *("train-draft", "--target", other, "--kind", "eagle3", *texts, "-o", tmp_path / "head", "--bundle", answering, *SHORT)
    )
    assert done.returncode == 2
    assert "has another tokenizer than" in done.stderr
    assert read_manifest(answering).roles == ("target", "draft")


def test_the_target_has_its_adapters(
    answering: Path, few: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a head learns from is the merged target; a bundle that answers must be of the same."""
    adapter, module = tmp_path / "adapter", "model.layers.0.self_attn.o_proj"
    plain = load_model(Source.parse(str(PAIR / "target")), "fp32").get_submodule(module).weight
    write_ones(adapter, {module: tuple(plain.shape)})
    options: TrainingOptions = {"lora": [f"{adapter}=0.25"], "start": str(PAIR / "head")}
    arguments = TrainingArguments.check(str(PAIR / "target"), "eagle3", [few[1]], tmp_path / "head", **options)
    monkeypatch.setattr("outrider.training.eagle3.open_head", lambda target, *_: target)
    target: Any = Eagle3Objective.open(arguments, [Example([1, 2], [False, True])])
    torch.testing.assert_close(target.get_submodule(module).weight.float(), plain + 1, rtol=0, atol=1e-2)
    with pytest.raises(UsageError, match="another adapter than"):
        check_target(arguments, answering, read_manifest(answering))


def test_a_full_disk_ends_the_run(answering: Path, few: tuple[str, Path], tmp_path: Path) -> None:
    """At the first checkpoint, wherever the room ends in it (test_loop.py); what was done before is kept for the next run."""
    with full_disk(1 << 18):
        done = run_here(
            *("train-draft", "--target", PAIR / "target", *HEAD, *few, "-o", tmp_path / "head"),
            *("--bundle", answering, *SHORT),
        )
    assert done.returncode == 1
    assert "no room to write" in done.stderr
    assert "free some disk space" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [".head.training"]


def test_a_run_that_is_refused_leaves_nothing(answering: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text('{"prompt": "one"}\n')
    command = ("train-draft", "--target", PAIR / "target", *HEAD, "--text", few, "-o", tmp_path / "head")
    done = run_here(*command, "--bundle", answering, *SHORT)
    assert done.returncode == 2
    assert "the texts have 1 different usable prompts" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["few.jsonl"]


def of_rounds(rounds: int, accepted: int) -> Stats:
    stats = Stats()
    for _ in range(rounds):
        stats.count("head", 4, accepted, 4 - accepted, 1)
    return stats


def test_a_draft_that_serves_otherwise_than_it_was_trained_is_not_finished() -> None:
    check_served(of_rounds(100, 1), of_rounds(100, 1))
    nearly = of_rounds(100, 1)
    nearly.accepted -= 8
    check_served(of_rounds(100, 1), nearly)
    for trained, served in ((1, 0), (0, 1), (1, 2)):
        with pytest.raises(ParityError, match="in PyTorch on the same texts"):
            check_served(of_rounds(100, trained), of_rounds(100, served))


def test_targets_that_a_head_cannot_read() -> None:
    with pytest.raises(UnsupportedModelError, match="the target has 2 layers"):
        new_config(llama(num_hidden_layers=2), 8)
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=2, n_layer=3, vocab_size=50, n_positions=64)).eval()
    tokens = torch.arange(20)
    assert open_head(model, None, tokens, 2).kept.equal(tokens)  # its layers have other names, and no intermediate_size
