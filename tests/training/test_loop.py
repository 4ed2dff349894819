"""What is learned is apart from what is measured on; an interrupted run ends as one that was not: with a toy for a draft."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoTokenizer

from outrider.bundle.folder import read_manifest
from outrider.errors import FolderError
from outrider.progress import SILENT, Progress
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.text.chat_template import ChatTemplate
from outrider.runtime.text.text import Text
from outrider.tests.support import END, PAIR, full_disk, llama, sealed_bundle, tokenizer, write_checkpoint
from outrider.training import train as train_module
from outrider.training.answers import AnswerStore, Example, TrainingAnswer, given_examples, held_out
from outrider.training.arguments import TrainingArguments
from outrider.training.loop import FINISHED, Schedule, fit, last_checkpoint, translated
from outrider.training.objective import Objective, TrainingBatch, measure
from outrider.training.pard import PardObjective
from outrider.training.texts import ChatMessage, Sample

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}" + END + "{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant: {% endif %}"


class Toy(Objective):
    """Learns one number; its loss depends on which examples come together, and in which order."""

    steps = 1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8))
        self.seen: list[list[int]] = []

    check = open = classmethod(lambda cls, *_: None)  # type: ignore[assignment]

    def forward(self, ids: torch.Tensor, drafted: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append(ids[:, 0].tolist())
        return {"loss": ((self.weight - ids.float().mean(0)[:8]) ** 2).sum() / 100}

    def agreement(self, batch: TrainingBatch) -> torch.Tensor:
        return torch.ones(*batch.ids.shape, 1, dtype=torch.bool)

    def write(self, folder: Path) -> None:
        raise NotImplementedError


class Interrupting(Progress):
    """Interrupts after some updates."""

    def __init__(self, updates: int):
        self._left = updates

    def advance(self, size: int) -> None:
        self._left -= size
        if self._left == 0:
            raise KeyboardInterrupt


def examples(count: int = 24) -> list[Example]:
    chance = random.Random(0)
    return [Example([at, *(chance.randrange(9) for _ in range(7))], [False] * 3 + [True] * 5) for at in range(count)]


def trained(folder: Path, progress: Progress = SILENT) -> tuple[Toy, list[dict[str, float]]]:
    toy = Toy()
    schedule = Schedule(epochs=2, batch=2, accumulate=1, learning_rate=0.1, seed=3)
    return toy, fit(toy, examples(), examples(2), schedule, folder, progress)


def test_an_interrupted_run_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole, history = trained(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "parts", Interrupting(13))
    resumed, continued = trained(tmp_path / "parts")
    assert len(whole.seen) == 24
    assert resumed.seen == whole.seen[12:]  # the same batches in the same order as in the second epoch
    assert torch.equal(whole.weight, resumed.weight)  # so does what the optimizer remembers
    assert continued == history
    assert {"loss", "mean_acceptance_length"} <= {key for entry in history for key in entry}


def test_the_last_whole_checkpoint_is_resumed(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    for step in (8, 16, 100, 96):
        (tmp_path / f"checkpoint-{step}").mkdir()
    assert last_checkpoint(tmp_path) is None
    for step in (8, 16, 96):
        (tmp_path / f"checkpoint-{step}" / FINISHED).write_text("{}")
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-96")
    for damaged in (b"", bytes(20)):
        (tmp_path / "checkpoint-100" / FINISHED).write_bytes(damaged)
        assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-96")
    (tmp_path / "checkpoint-100" / FINISHED).write_text("{}")
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-100")


def test_a_full_disk_is_recognized_wherever_the_room_ends(tmp_path: Path) -> None:
    """torch and safetensors say it in several ways, and torch in another one at the end of its file."""
    tensors, written = {"a": torch.randn(2000), "b": torch.randn(5)}, list[int]()
    for save in (torch.save, save_file):
        path = tmp_path / save.__name__
        save(tensors, path)
        size = path.stat().st_size
        for most in (0, 40, 200, *range(1000, size, 3000), *range(size - 900, size, 50), size - 1):
            with full_disk(most), pytest.raises(FolderError, match="no room to write"), translated(tmp_path):
                save(tensors, path)
            written.append(path.stat().st_size)
    assert len({*written}) > 20
    with pytest.raises(FolderError, match="no room to write"), translated(tmp_path):
        torch.save(tensors, "/dev/full")


def test_a_draft_of_one_token_learns_what_a_language_model_learns() -> None:
    """The loss is that of transformers, whose labels are the ids themselves: -100 leaves a token out."""
    model = llama(vocab_size=400)
    objective = PardObjective(model, AutoTokenizer.from_pretrained(PAIR / "target"), steps=1)
    first, second = [5, 6, 7, 8, 9, 10], [11, 12, 13, 14]
    batch = TrainingBatch.of([Example(first, [False] * 2 + [True] * 4), Example(second, [False] * 3 + [True])])
    labels = torch.where(batch.drafted, batch.ids, -100)
    with torch.no_grad():
        want = model(input_ids=batch.ids, labels=labels).loss
        got = objective(**batch._asdict())["loss"]
    torch.testing.assert_close(got, want)


def test_a_measurement_counts_what_rounds_would_emit() -> None:
    class Half(Toy):
        def agreement(self, batch: TrainingBatch) -> torch.Tensor:
            agrees = torch.zeros(*batch.ids.shape, 4, dtype=torch.bool)
            agrees[:, 2::2, :2] = True  # after every other token, two of four proposals are right
            return agrees

    stats = measure(Half(), [Example([*range(12)], [False] * 3 + [True] * 9)], 4)
    # Rounds at 3, 6, 7, 10 and 11: 2 accepted of 4 drafted, 0 of 4, 2 of 4, 0 of 1, and one that has nothing to draft.
    assert (stats.rounds, stats.drafted, stats.accepted, stats.emitted) == (5, 13, 4, 9)


def texts(count: int = 60) -> list[Sample]:
    return [
        Sample(
            messages=[
                ChatMessage("user", f"What are {at} foxes?"),
                ChatMessage("assistant", f"They are {at} foxes, lazy ones."),
            ]
        )
        for at in range(count)
    ]


def test_an_answer_is_learned_with_the_token_that_ends_it_unless_it_is_cut() -> None:
    text = Text(tokenizer(), ChatTemplate(TEMPLATE, {}))
    for longest, ends in ((200, True), (50, False)):
        for example, prompt in given_examples(texts(), text, longest, [0]):
            assert (example.ids[: len(prompt)], len(example.ids) <= longest) == (prompt, True)
            assert (example.ids[-1] == 0) == ends
            assert example.drafted == [False] * len(prompt) + [True] * (len(example.ids) - len(prompt))


@pytest.mark.parametrize(
    "damage", [lambda line: line[:-5], lambda line: line[:-1], lambda line: bytes(len(line)) + b"\n" + line]
)
def test_an_answer_that_was_cut_off_is_asked_for_again(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    """The others are not."""
    path, params = tmp_path / "answers.jsonl", SamplingParams(max_new_tokens=8)
    whole, cut_off = (AnswerStore(path, "a target", params, 32).prompt(ids, None).key for ids in ([1, 2], [3, 4]))
    lines = [msgspec.json.encode(TrainingAnswer(key, [5, 6])) + b"\n" for key in (whole, cut_off)]
    path.write_bytes(lines[0] + damage(lines[1]))
    assert AnswerStore(path, "a target", params, 32).known == {whole: [5, 6]}
    assert path.read_bytes() == lines[0]  # the next one begins a line


def test_answers_are_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("not an answer")
    (tmp_path / "answers.jsonl").symlink_to(tmp_path / "other")
    with pytest.raises(FolderError, match="is a link, or not a regular file"):
        AnswerStore(tmp_path / "answers.jsonl", "a target", SamplingParams(max_new_tokens=8), 32)
    assert (tmp_path / "other").read_text() == "not an answer"


@pytest.mark.parametrize("given", [False, True])
def test_what_is_measured_on_is_not_learned(given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, target = sealed_bundle(tmp_path / "bundle"), write_checkpoint(tmp_path / "target", llama())
    options: dict[str, Any] = {"bundle": bundle, "given": given, "max_length": 100, "max_new_tokens": 16}
    file = tmp_path / "texts.txt"
    file.write_text("any")
    arguments = TrainingArguments.check(str(target), "eagle3", [file], tmp_path / "draft", **options)
    object.__setattr__(arguments, "samples", texts())
    manifest = read_manifest(bundle)
    loaded = SimpleNamespace(manifest=manifest, build=manifest.build, text=Text(tokenizer(), ChatTemplate(TEMPLATE, {})))
    asked: list[list[int]] = []

    def generate(self: AnswerStore, _: object, prompts: Sequence[Any], progress: Progress) -> None:
        for prompt in prompts:
            asked.append(prompt.ids)
            self.known[prompt.key] = [7, 8, 9, 0]

    monkeypatch.setattr(Outrider, "load", lambda *_, **__: nullcontext(loaded))
    monkeypatch.setattr(train_module, "check_target", lambda *_: None)
    monkeypatch.setattr(AnswerStore, "generate", generate)
    data = train_module.prepare_data(arguments, None, tmp_path, SILENT)

    def prompts(examples: Sequence[Example]) -> set[tuple[int, ...]]:
        return {tuple(each.ids[: each.drafted.index(True)]) for each in examples}

    away = sum(held_out(60))
    assert (len(data.trained), len(data.held_out), away) == (60 - away, away, 3)
    assert not prompts(data.trained) & prompts(data.held_out)
    assert len(prompts(data.trained) | prompts(data.held_out)) == 60
    assert all(each.ids[-4:] == [7, 8, 9, 0] for each in data.held_out)  # the target's own answers, which are what is served
    assert len(asked) == (away if given else 60)
