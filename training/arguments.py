"""The arguments of `train-draft`, checked without importing torch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, Unpack

import msgspec

from outrider.bundle.folder import check_absent
from outrider.errors import UsageError
from outrider.export.checkpoints.adapters import Adapter
from outrider.export.checkpoints.source import Source
from outrider.runtime.params import SamplingParams
from outrider.training.texts import Sample, read_texts

KINDS = ("eagle3", "pard")
MAX_SEED = 2**31  # each answer has its own seed, and numpy's limit is 2**32
STARTS = {"eagle3": ("head",), "pard": ("draft", "parallel-draft")}  # roles of `Source.drafting_role`
LEARNING_RATE = {"eagle3": 5e-4, "pard": 1e-4}


class TrainingOptions(TypedDict, total=False):
    """How a draft is trained."""

    start: str | None  # a checkpoint to start from
    bundle: Path | None  # a bundle of the target, to generate answers with
    lora: Sequence[str]  # adapters to merge into the target
    given: bool  # whether to learn the answers in the texts
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
    "lora": (),
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
    """Checked arguments."""

    named: str  # the target's name on the command line
    target: Source
    kind: str
    samples: list[Sample]
    output: Path
    start: Source | None
    adapters: tuple[Adapter, ...]  # of the target
    options: TrainingOptions

    def digest(self, *more: object) -> str:
        """Return a digest of the target, its adapters, precision and most tokens, and of `more`, for the name of a folder."""
        own = self.named, self.options["lora"], self.options["precision"], self.options["max_length"]
        return hashlib.sha256(msgspec.json.encode((own, more))).hexdigest()[:16]

    @property
    def work(self) -> Path:
        """The folder next to the output with the files that an interrupted run resumes from."""
        return self.output.parent / f".{self.output.name}.training"

    @property
    def sampling(self) -> SamplingParams:
        """The sampling settings of the target's answers, without seeds."""
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
            SourceError: a checkpoint is not there, or an adapter cannot be read.
            UnsupportedModelError: an adapter is of a kind that is not merged.
            FolderError: the output exists.
        """
        chosen: TrainingOptions = {**DEFAULTS, **options}
        if kind not in KINDS:
            raise UsageError(f"unknown kind of draft: {kind!r}", f"use one of {', '.join(KINDS)}", param="kind")
        if kind == "pard" and chosen["start"] is None:
            raise UsageError(
                "a parallel draft starts from a small model with the target's vocabulary",
                "pass one with --from",
                param="start",
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
        adapters = tuple(map(Adapter.parse, chosen["lora"]))
        checked = cls(target, Source.parse(target), kind, read_texts(texts), final, start, adapters, chosen)
        _ = checked.sampling
        return checked
