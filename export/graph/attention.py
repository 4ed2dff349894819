"""The attention of step models: the attention and mask functions that transformers calls during a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.onnx.ops import symbolic
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from outrider.errors import UnsupportedModelError
from outrider.export.graph.tracing import OPSET

ATTENTION = "outrider_step"


@dataclass(slots=True)
class AttentionPass:
    """The state of one pass that `step_attention` and `step_mask` need besides transformers' arguments."""

    rows: torch.Tensor  # int64 [B, S], the absolute index of each row
    keys: torch.Tensor  # int64 [L], the absolute index of each key
    spare_row: bool  # attention computes its last row twice
    calls: int = 0  # of step_attention


_current: ContextVar[AttentionPass] = ContextVar("_current")


@contextmanager
def attention_pass(rows: torch.Tensor, keys: torch.Tensor, spare_row: bool) -> Iterator[AttentionPass]:
    """Let a model attend with these rows and keys; see `AttentionPass`."""
    current = AttentionPass(rows, keys, spare_row)
    token = _current.set(current)
    try:
        yield current
    finally:
        _current.reset(token)


def step_mask(mask_function: Callable[..., torch.Tensor], **_: Any) -> torch.Tensor:
    """Return the mask, bool [B, 1, S, L]: the model's own rule (causal, sliding, chunked) at absolute positions."""
    current = _current.get()
    batch = torch.arange(current.rows.shape[0])[:, None, None, None]
    head = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    return mask_function(batch, head, current.rows[:, None, :, None], current.keys[None, None, None, :])


def step_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Emit one ONNX `Attention` node: query [B, H, S, D], key and value [B, Hkv, L, D] -> [B, S, H, D]."""
    if attention_mask is None or attention_mask.dtype != torch.bool:
        raise UnsupportedModelError(f"{type(module).__name__} uses attention without a causal mask")
    current = _current.get()
    current.calls += 1
    if options.get("position_bias") is not None:
        raise UnsupportedModelError(f"{type(module).__name__} uses `position_bias`, which ONNX Attention cannot express")
    sinks: torch.Tensor | None = options.get("s_aux")
    scale = float(scaling) if scaling is not None else query.shape[-1] ** -0.5
    rows = query.shape[2]
    if current.spare_row:
        query = torch.cat([query, query[:, :, -1:]], 2)
        attention_mask = torch.cat([attention_mask, attention_mask[:, :, -1:]], 2)
    if softcap is None and sinks is None:
        shape = (*query.shape[:-1], value.shape[-1])
        inputs = (query, key, value, attention_mask)
        output = symbolic("Attention", inputs, {"scale": scale}, dtype=query.dtype, shape=shape, version=OPSET)
    else:
        output = _written_out(query, key, value, attention_mask, scale, softcap, sinks)
    if current.spare_row:
        output = output[:, :, :rows]
    return output.transpose(1, 2).contiguous(), None  # as transformers' own functions return it


def _written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention in plain operators, for features that ONNX's or TensorRT's `Attention` lacks.

    Query heads are grouped by their key/value head, so that keys and values are not repeated in memory.

    Args:
        softcap: scores become `softcap * tanh(scores / softcap)`.
        sinks: [H], one more score per head; it takes a share of the weights but has no value (GPT-OSS).
    """
    batch, heads, rows, width = query.shape
    groups = heads // key.shape[1]
    grouped = query.contiguous().reshape(batch, key.shape[1], groups * rows, width)
    scores = (grouped @ key.transpose(2, 3)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.reshape(batch, heads, rows, key.shape[2])
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is None:
        weights = scores.softmax(-1, dtype=torch.float32)
    else:
        sink = sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(batch, -1, rows, 1)
        weights = torch.cat([scores, sink], -1).softmax(-1, dtype=torch.float32)[..., :-1]
    weights = weights.to(query.dtype).reshape(batch, key.shape[1], groups * rows, key.shape[2])
    return (weights @ value).reshape(batch, heads, rows, value.shape[-1])


AttentionInterface.register(ATTENTION, step_attention)
AttentionMaskInterface.register(ATTENTION, step_mask)
