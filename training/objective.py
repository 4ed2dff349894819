"""The interface between the training loop and a kind of draft. A new kind is a file with a subclass of `Objective`."""

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

ROWS = 512  # rows whose logits are in memory at the same time


class TrainingBatch(NamedTuple):
    """The examples of one pass."""

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
    """A draft, its loss, and its format. The parameters that require gradients are trained."""

    drafter: ClassVar[str]  # the drafter that serves it
    steps: int  # tokens to draft in a round

    @classmethod
    @abstractmethod
    def check(cls, target: Source, start: Source | None) -> int | None:
        """Check the configurations of a target and of a checkpoint to start from, without loading the models.

        Returns:
            The most tokens that the draft can read, or None.

        Raises:
            SourceError, UnsupportedModelError, VocabularyMismatchError: a checkpoint cannot be read, or does not fit.
        """

    @classmethod
    @abstractmethod
    def open(cls, arguments: TrainingArguments, examples: Sequence[Example]) -> Objective:
        """Load the draft, and the models that its loss needs, onto the device.

        Raises the errors of `check`.
        """

    @abstractmethod
    def forward(self, ids: torch.Tensor, drafted: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the `loss` of a `TrainingBatch`, a scalar to minimize."""

    @abstractmethod
    def agreement(self, batch: TrainingBatch) -> torch.Tensor:
        """Return bool [B, S, steps]: whether each token that the draft proposes after token i is the one that follows.

        The draft reads the text, not its own wrong proposals. Proposals beyond the end count as wrong. Before the answer, the
        values do not matter.
        """

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Write the draft as a checkpoint into an existing folder, in the usual format of its kind.

        Raises:
            OSError: it cannot be written.
        """

    def state_dict(self, *args: object, **kwargs: object) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """Return only the trained parameters, without the target's."""
        return {name: each.detach() for name, each in self.named_parameters() if each.requires_grad}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = True, assign: bool = False) -> Any:
        """Load the result of `state_dict`. Other parameters do not count as missing."""
        result = super().load_state_dict(state_dict, False, assign)
        return result._replace(missing_keys=sorted(self.state_dict().keys() & {*result.missing_keys}))


def mean_of_rows(loss: Callable[..., torch.Tensor], *rows: torch.Tensor) -> torch.Tensor:
    """Return the mean of a loss over rows, a few at a time, and recompute it for the gradients.

    The logits of all rows would take gigabytes.

    Args:
        loss: returns the sum of the losses of some rows, a scalar.
        rows: the arguments of `loss`, such as [N, H] and [N].
    """
    parts = zip(*(torch.split(each, ROWS) for each in rows), strict=True)
    sums = [checkpoint(loss, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    return torch.stack(sums).sum() / len(rows[0])


@torch.no_grad()
def measure(objective: Objective, examples: Sequence[Example], k: int) -> Stats:
    """Count the tokens that greedy decoding of the examples would draft and accept at a fixed k.

    As in serving, the first round begins at the first token of an answer, and each round after the last emitted token.
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
