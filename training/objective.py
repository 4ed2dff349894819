"""The seam between the training loop and what is trained: a new kind of draft is a file with a subclass of `Objective`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from outrider.export.checkpoints.source import Source
from outrider.runtime.stats import Stats
from outrider.training.answers import Example
from outrider.training.arguments import TrainingArguments

ROWS = 512  # whose logits are in memory at once


class TrainingBatch(NamedTuple):
    """Examples of one pass."""

    ids: torch.Tensor  # int64 [B, S], padded on the right
    drafted: torch.Tensor  # bool [B, S]: the assistant's tokens

    @classmethod
    def of(cls, examples: Sequence[Example]) -> TrainingBatch:
        """Pad examples to the longest."""
        longest = max(len(example.ids) for example in examples)
        ids = torch.zeros(len(examples), longest, dtype=torch.int64)
        drafted = torch.zeros(len(examples), longest, dtype=torch.bool)
        for row, example in enumerate(examples):
            ids[row, : len(example.ids)] = torch.tensor(example.ids)
            drafted[row, : len(example.ids)] = torch.tensor(example.drafted)
        return cls(ids, drafted)


class Objective(nn.Module, ABC):
    """A draft, how its loss is computed, and how it is written. Its parameters that need gradients are what is trained."""

    drafter: ClassVar[str]  # the drafter that serves it
    steps: int  # tokens that it learns to draft in a round

    @classmethod
    @abstractmethod
    def check(cls, target: Source, start: Source | None) -> int | None:
        """Check from the configurations alone that a draft for a target can be trained, from a checkpoint if there is one.

        Returns:
            the most tokens that the draft can read, if it has a limit.

        Raises:
            UsageError: the checkpoint is of another kind.
            SourceError, UnsupportedModelError, VocabularyMismatchError: it cannot be read, or does not fit the target.
        """

    @classmethod
    @abstractmethod
    def open(cls, arguments: TrainingArguments, examples: Sequence[Example]) -> Objective:
        """Load the draft, and the models that it is trained against, onto the device.

        Errors are those of `check`.
        """

    @abstractmethod
    def forward(self, ids: torch.Tensor, drafted: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the `loss` of a `Batch`, a scalar to be minimized."""

    @abstractmethod
    def agreement(self, batch: TrainingBatch) -> torch.Tensor:
        """Return bool [B, S, steps]: whether the tokens that the draft proposes after token i are those that follow, each given
        that all before it are. Proposals for what lies beyond the end are wrong, and those before the answer need not be
        right."""

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Write the draft as a checkpoint into an existing folder, in the format in which it is published.

        Raises:
            OSError: it cannot be written.
        """

    def state_dict(self, *args: object, **kwargs: object) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """Return what is trained, and nothing of the target."""
        return {name: each.detach() for name, each in self.named_parameters() if each.requires_grad}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = True, assign: bool = False) -> Any:
        """Load what `state_dict` returned; nothing else counts as missing."""
        result = super().load_state_dict(state_dict, False, assign)
        return result._replace(missing_keys=sorted(self.state_dict().keys() & {*result.missing_keys}))


def mean_of_rows(loss: Callable[..., torch.Tensor], *rows: torch.Tensor) -> torch.Tensor:
    """Return the mean of a loss over rows, such as [N, H] and [N], a few at a time, and once more for the gradients: the logits
    of all rows over a vocabulary would take gigabytes.

    Args:
        loss: returns the sum over the rows that it is given, a scalar.
        rows: what it takes.
    """
    parts = zip(*(torch.split(each, ROWS) for each in rows), strict=True)
    sums = [checkpoint(loss, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    return torch.stack(sums).sum() / len(rows[0])


@torch.no_grad()
def measure(objective: Objective, examples: Sequence[Example], k: int) -> Stats:
    """Return how many tokens would be drafted and accepted in greedy decoding of the examples, at a fixed k.

    Rounds begin at the first token of an answer, and each goes on after what the one before emitted, as when served.
    """
    stats = Stats()
    training = objective.training
    objective.eval()
    for example in examples:
        agrees = objective.agreement(TrainingBatch.of([example]))[0].cpu()
        end, at = len(example.ids), example.drafted.index(True)
        while at < end:
            count = min(k, end - at - 1)
            right = agrees[at - 1, :count].int().cumprod(0).sum().item()
            stats.count("trained", count, int(right), int(right < count), 1)
            at += int(right) + 1
    objective.train(training)
    return stats
