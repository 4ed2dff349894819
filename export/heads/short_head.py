"""A draft's output head for some tokens of the target's vocabulary, such as the most frequent ones (`--draft-vocab`).

The head is a large part of a small model, so a shorter one makes the draft faster. It only costs acceptance: the other tokens
have probability zero in the draft, and the target can still choose them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedModel

from outrider.errors import UsageError


class ShortHead(nn.Module):
    """A head for some tokens. The logits of all other tokens are minus infinity."""

    place: torch.Tensor

    def __init__(self, rows: nn.Linear, tokens: torch.Tensor, vocab_rows: int):
        """Place the logits from `rows`, one for each of `tokens`, int64 [N], in a vocabulary of `vocab_rows`."""
        super().__init__()
        self.rows = rows
        place = torch.full((vocab_rows,), len(tokens))  # of each token's logit; the last place has minus infinity
        place[tokens] = torch.arange(len(tokens))
        self.register_buffer("place", place)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [..., V] of hidden states [..., K]."""
        logits = self.rows(hidden)
        others = torch.full_like(logits[..., :1], -torch.inf)
        return torch.cat([logits, others], -1).index_select(-1, self.place)


def output_head(model: PreTrainedModel) -> nn.Module:
    """Return the layer that computes the logits, even inside a `ShortHead`."""
    head = model.get_output_embeddings()
    layer: nn.Module = getattr(head, "rows", head)
    return layer


def frequent_tokens(tokenizer: str, text: Path, count: int, tokens: int, always: list[int]) -> torch.Tensor:
    """Return the ids of the most frequent tokens of a text, int64 [count], in ascending order.

    If the text has fewer distinct tokens, the lowest ids fill the rest; in a BPE vocabulary these are the more common ones.

    Args:
        tokenizer: the contents of a tokenizer.json.
        text: the path of a UTF-8 text.
        count: how many ids to return.
        tokens: the size of the vocabulary.
        always: ids to include even if they are rare.

    Raises:
        UsageError: `count` does not fit the vocabulary.
    """
    if not len(set(always)) < count < tokens:
        raise UsageError(
            f"--draft-vocab {count} does not fit a vocabulary of {tokens:,}",
            f"use a number from {len(set(always)) + 1} to {tokens - 1:,}",
        )
    ids = Tokenizer.from_str(tokenizer).encode(text.read_text(encoding="utf-8"), add_special_tokens=False).ids
    counts = np.bincount(ids, minlength=tokens)[:tokens].astype(np.int64)
    counts[always] = np.iinfo(np.int64).max
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:count]))


def propose(model: PreTrainedModel, tokens: torch.Tensor, vocab_rows: int) -> None:
    """Replace a model's head by a `ShortHead` for `tokens`, int64 [N], in a vocabulary of `vocab_rows`.

    Raises:
        UsageError: the head is not a linear layer.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UsageError(
            f"{type(model).__name__} cannot be limited to some tokens: its output head is not a linear layer",
            "leave --draft-vocab out, and choose a draft with as many logits as the target",
        )
    rows = nn.Linear(head.in_features, len(tokens), bias=head.bias is not None, dtype=head.weight.dtype)
    rows.weight = nn.Parameter(head.weight[tokens].clone(), requires_grad=False)
    if head.bias is not None:
        rows.bias = nn.Parameter(head.bias[tokens].clone(), requires_grad=False)
    model.set_output_embeddings(ShortHead(rows, tokens, vocab_rows))
