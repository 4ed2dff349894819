"""The cache of a step model: transformers cache layers whose tensors are inputs and outputs of the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.onnx.ops import symbolic
from transformers.cache_utils import CacheLayerMixin

from outrider.engines.contract import CacheTensor, RecurrentLayer, cache_tensors
from outrider.errors import UnsupportedModelError
from outrider.export.graph.tracing import OPSET


def scatter(past: torch.Tensor, update: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Emit one `TensorScatter`: write rows [B, H, S, D] into `past` [B, H, C, D], from index `positions` [B] on."""
    inputs = (past, update.contiguous(), positions)
    return symbolic("TensorScatter", inputs, {"axis": -2}, dtype=past.dtype, shape=past.shape, version=OPSET)


class HeldLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """The cache of one layer. transformers neither allocates it nor asks for its length."""

    is_sliding = False

    @property
    def held(self) -> list[torch.Tensor]:
        """What the layer keeps: inputs of a step, then outputs."""
        return []

    def hold(self, tensors: Sequence[torch.Tensor], like: Any) -> None:
        """Replace the kept tensors, and take over from the layer `like` which of them were updated."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the tensors exist already."""

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0  # unused: `step_mask` knows its rows


class EmptyLayer(HeldLayer):
    """The cache of a layer that keeps nothing."""

    def update(self, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        raise UnsupportedModelError("a layer without attention attends")


class StepLayer(HeldLayer):
    """The cache of one attention layer, written with `TensorScatter` and read through a window as long as `key_positions`."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor, key_positions: torch.Tensor):
        super().__init__()
        self.keys, self.values = key, value
        self.positions, self.key_positions = positions, key_positions
        self.updated = False
        self.is_initialized = True

    @property
    def held(self) -> list[torch.Tensor]:
        return [self.keys, self.values]

    def hold(self, tensors: Sequence[torch.Tensor], like: Any) -> None:
        (self.keys, self.values), self.updated = tensors, like.updated

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.updated:
            raise UnsupportedModelError("two attention layers write to one cache layer")
        self.updated = True
        self.keys = scatter(self.keys, key_states, self.positions)
        self.values = scatter(self.values, value_states, self.positions)
        return self._window(self.keys), self._window(self.values)

    def _window(self, present: torch.Tensor) -> torch.Tensor:
        # torch.export would have to prove that a torch slice fits the capacity.
        end = symbolic("Shape", (self.key_positions,), dtype=torch.int64, shape=(1,), version=OPSET)
        inputs = (present, torch.tensor([0]), end, torch.tensor([2]))
        shape = (*present.shape[:2], self.key_positions.shape[0], present.shape[3])
        return symbolic("Slice", inputs, dtype=present.dtype, shape=shape, version=OPSET)


class CacheLayout(NamedTuple):
    """The sizes of what a model's cache keeps, per layer."""

    layers: list[tuple[int, int, int]]  # (key/value heads, key width, value width) of each layer with attention
    recurrent: Sequence[RecurrentLayer] = ()
    kinds: Sequence[tuple[bool, bool]] = ()  # per layer: (has attention, is recurrent); () if all layers only have attention

    def tensors(self, features: int | None = None) -> list[CacheTensor]:
        """Return the cache tensors, including features of the width `features` unless it is None."""
        return cache_tensors(self.layers, features, self.recurrent)
