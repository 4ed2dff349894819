"""`--draft-vocab`: a draft that proposes its most frequent tokens only, for the product that gives the logits is a large part
of a small model. Nothing is lost but acceptance: the others have probability zero there, and the target may still choose them.
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
    """The rows of a head for some tokens, int64 [N]; the logits of the others are minus infinity."""

    place: torch.Tensor

    def __init__(self, head: nn.Linear, tokens: torch.Tensor):
        super().__init__()
        self.rows = nn.Linear(head.in_features, len(tokens), bias=head.bias is not None, dtype=head.weight.dtype)
        self.rows.weight = nn.Parameter(head.weight[tokens].clone(), requires_grad=False)
        if head.bias is not None:
            self.rows.bias = nn.Parameter(head.bias[tokens].clone(), requires_grad=False)
        place = torch.full((head.out_features,), len(tokens))
        place[tokens] = torch.arange(len(tokens))
        self.register_buffer("place", place)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., V]."""
        logits = self.rows(hidden)
        others = torch.full_like(logits[..., :1], -torch.inf)
        return torch.cat([logits, others], -1).index_select(-1, self.place)


def frequent_tokens(tokenizer: str, text: Path, count: int, tokens: int, always: list[int]) -> torch.Tensor:
    """The `count` tokens, of ids below `tokens`, that a text has most, in order; `always` among them. Where it has fewer, the
    lowest ids follow, which in vocabularies made by merging pairs are the commoner ones.

    Args:
        tokenizer: the contents of a tokenizer.json.

    Raises:
        UsageError: there is no such text, or so many are not fewer.
    """
    if not len(set(always)) < count < tokens:
        raise UsageError(
            f"--draft-vocab {count} does not fit a vocabulary of {tokens:,}",
            f"give a number between {len(set(always)) + 1} and {tokens - 1:,}",
        )
    try:
        ids = Tokenizer.from_str(tokenizer).encode(text.read_text(encoding="utf-8"), add_special_tokens=False).ids
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{text} cannot be read as a text: {error}", "give a UTF-8 text like what the pair will write"
        ) from error
    seen = np.bincount(ids, minlength=tokens)[:tokens].astype(np.int64)
    seen[always] = np.iinfo(np.int64).max
    return torch.from_numpy(np.sort(np.argsort(-seen, kind="stable")[:count]))


def shorten(model: PreTrainedModel, tokens: torch.Tensor) -> None:
    """Give a model a head of these tokens alone.

    Raises:
        UsageError: its head is no linear layer.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UsageError(f"--draft-vocab does not fit {type(model).__name__}: its head is no linear layer", "leave it out")
    model.set_output_embeddings(ShortHead(head, tokens))
