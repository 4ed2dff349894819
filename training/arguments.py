"""What `train-draft` is asked for, checked as far as that goes without torch."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, Unpack

import msgspec

from outrider.bundle.folder import check_absent
from outrider.errors import UsageError
from outrider.export.checkpoints.source import Source
from outrider.runtime.params import SamplingParams
from outrider.training.texts import Sample, read_texts

KINDS = ("eagle3", "pard")
MAX_SEED = 2**31  # numpy's is below 2**32, and each answer has one of its own
STARTS = {"eagle3": ("head",), "pard": ("draft", "parallel-draft")}  # what `Source.drafting_role` calls them
LEARNING_RATE = {"eagle3": 5e-4, "pard": 1e-4}


class TrainingOptions(TypedDict, total=False):
    """How a draft is trained."""

    start: str | None  # a checkpoint to start from
    bundle: Path | None  # of the target, to answer with
    given: bool  # whether the texts have the answers
    temperature: float
    max_new_tokens: int
    max_length: int  # tokens of prompt and answer
    epochs: float
    batch: int
    accumulate: int
    learning_rate: float | None
    draft_vocab: int
    k: int
    precision: str
    seed: int


DEFAULTS: TrainingOptions = {
    "start": None,
    "bundle": None,
    "given": False,
    "temperature": 0.0,
    "max_new_tokens": 256,
    "max_length": 512,
    "epochs": 3.0,
    "batch": 4,
    "accumulate": 1,
    "learning_rate": None,
    "draft_vocab": 32_000,
    "k": 4,
    "precision": "int8",
    "seed": 0,
}


@dataclass(frozen=True, slots=True)
class TrainingArguments:
    """The arguments of a training that agree with each other."""

    named: str  # the target as it was given
    target: Source
    kind: str
    samples: list[Sample]
    output: Path
    start: Source | None
    options: TrainingOptions

    def digest(self, *further: object) -> str:
        """Return what tells apart what was made of one target and precision from what was made of others."""
        own = self.named, self.options["precision"], self.options["max_length"]
        return hashlib.sha256(msgspec.json.encode((own, further))).hexdigest()[:16]

    @property
    def work(self) -> Path:
        """The folder beside the output with what an interrupted run goes on from."""
        return self.output.parent / f".{self.output.name}.training"

    @property
    def sampling(self) -> SamplingParams:
        """How the target answers, except for seeds."""
        return SamplingParams(temperature=self.options["temperature"], max_new_tokens=self.options["max_new_tokens"])

    @property
    def learning_rate(self) -> float:
        """The highest learning rate."""
        return self.options["learning_rate"] or LEARNING_RATE[self.kind]

    @classmethod
    def check(
        cls, target: str, kind: str, texts: list[Path], output: Path, **options: Unpack[TrainingOptions]
    ) -> TrainingArguments:
        """Check the arguments of `train_draft`.

        Raises:
            UsageError: options contradict each other or are out of range, or a text cannot be read.
            SourceError: a checkpoint is not there.
            FolderError: the output exists.
        """
        chosen: TrainingOptions = {**DEFAULTS, **options}
        if kind not in KINDS:
            raise UsageError(f"there is no kind {kind!r} of draft", f"use one of {', '.join(KINDS)}", param="kind")
        if kind == "pard" and chosen["start"] is None:
            raise UsageError(
                "a parallel draft is made of a small model with the target's vocabulary", "name one with --from", param="start"
            )
        for name, least in (("max_new_tokens", 8), ("max_length", 32), ("batch", 1), ("accumulate", 1), ("k", 1)):
            if chosen[name] < least:  # type: ignore[literal-required]
                raise UsageError(f"{name} is {chosen[name]}", f"use {least} or more", param=name)  # type: ignore[literal-required]
        for name in ("epochs", "draft_vocab", "learning_rate"):
            if (value := chosen[name]) is not None and not (value > 0 and math.isfinite(value)):  # type: ignore[literal-required]
                raise UsageError(f"{name} is {value}", "use a number above 0", param=name)
        if chosen["k"] + 2 > chosen["max_length"] // 2:
            raise UsageError(f"k is {chosen['k']}", "use less than half of --max-length", param="k")
        if not 0 <= chosen["seed"] < MAX_SEED:
            raise UsageError(f"seed is {chosen['seed']}", f"use a number from 0 to {MAX_SEED - 1:,}", param="seed")
        final = check_absent(output)
        start = None if chosen["start"] is None else Source.parse(chosen["start"])
        if start is not None and start.drafting_role() not in STARTS[kind]:
            hint = f"--kind {kind} starts from a {' or a '.join(STARTS[kind]).replace('-', ' ')}"
            raise UsageError(f"{start.name} is a {start.drafting_role().replace('-', ' ')}", hint, param="start")
        checked = cls(target, Source.parse(target), kind, read_texts(texts), final, start, chosen)
        _ = checked.sampling
        return checked
