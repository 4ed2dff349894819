"""Attention for training several draft steps ahead (EAGLE-3's training-time test, Li et al. 2025, section 3.2).

A chain of draft steps begins at every row of a text. Step s of the chain at row c attends to the rows 0..c, which have real
features, and to the steps 1..s of its own chain. All chains take a step in one pass. So each layer keeps one tensor of keys and
values per step, and a later step reads only its own row of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface

from outrider.export.graph.cache_layers import HeldLayer

ATTENTION = "outrider_chains"

_current: ContextVar[list[ChainLayer]] = ContextVar("_current")


class ChainLayer(HeldLayer):
    """The keys and values of one layer, [B, Hkv, R, D] for each step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        self.steps.append((key_states, value_states))
        return key_states, value_states


@contextmanager
def chains(layers: int) -> Iterator[Cache]:
    """Yield the cache for the chains of one batch, for a model with this number of layers."""
    kept = [ChainLayer() for _ in range(layers)]
    token = _current.set(kept)
    try:
        yield Cache(layers=kept)
    finally:
        _current.reset(token)


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _: Any,
    scaling: float,
    sliding_window: int | None = None,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from rows [B, H, R, D], one per unfinished chain, and return [B, R, H, D].

    A window ends at the position of the step, which is the position of the chain's row plus the number of earlier steps.
    """
    batch, heads, rows, width = query.shape
    kept = _current.get()[module.layer_idx].steps  # type: ignore[index]
    groups = heads // key.shape[1]
    query = query.reshape(batch, -1, groups, rows, width) * scaling
    (keys, values), *own = [(k[:, :, None, :rows], v[:, :, None, :rows]) for k, v in kept]
    hidden = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)
    if sliding_window is not None:
        hidden |= torch.ones_like(hidden).tril(len(own) - sliding_window)
    scores = [(query @ keys.transpose(-2, -1)).masked_fill(hidden, -torch.inf)]
    scores += [(query * k).sum(-1, keepdim=True) for k, _ in own]
    weights = torch.cat(scores, -1).softmax(-1, dtype=torch.float32).to(values.dtype)
    mixed = weights[..., :rows] @ values
    for index, (_, v) in enumerate(own):
        mixed = mixed + weights[..., rows + index, None] * v
    return mixed.reshape(batch, heads, rows, width).transpose(1, 2), None


def no_mask(**_: Any) -> None:
    """Return no mask: `attention` makes its own."""


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, no_mask)
