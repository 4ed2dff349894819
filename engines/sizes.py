"""The sizes of a session, and whether its cache fits the memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from outrider.engines.contract import (
    BATCH_DIM,
    PAST_FEATURES,
    ROWS_DIM,
    CacheTensor,
    RecurrentLayer,
    Stage,
    Tensor,
    cache_tensors,
    sized,
)
from outrider.engines.device import Device, Layout
from outrider.engines.precisions import DTYPES
from outrider.errors import EngineError


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a session and its model."""

    layers: Sequence[tuple[int, int, int]]
    """(key/value heads, key width, value width) of each layer with attention"""
    vocab_rows: int
    """width of the logits"""
    capacity: int
    """positions of the cache"""
    windows: list[int]
    """the windows of the engine, ascending; the last one is the capacity"""
    max_rows: int
    """rows of the longest pass"""
    batch: int
    """sequences, each with a slot of the cache"""
    features: int | None = None
    """width of the features that the model writes or reads; None if it has none"""
    reads_features: bool = False
    """whether the model is a draft head"""
    mask_token: int = 0
    """for models that draft in one pass: the token that stands for unknown tokens"""
    block_state: int | None = None
    """width of a block head's output for its Markov and confidence heads; None if it has none"""
    from_anchor: bool = False
    """for block heads: whether the last confirmed token's row gives the logits of the first drafted token"""
    recurrent: Sequence[RecurrentLayer] = ()
    """the recurrent layers"""
    recent: int = 0
    """rows that the recurrent layers keep, R of the contract"""
    stage: Stage | None = None
    """the part of the model that the session runs; None is the whole"""

    def of(self, stage: Stage) -> Sizes:
        """Return the sizes of a stage of the model."""
        return replace(self, stage=stage, features=self.features if PAST_FEATURES in stage.inputs else None)

    @property
    def tensors(self) -> list[CacheTensor]:
        """The tensors of the cache, in the order of the model's inputs."""
        whole = cache_tensors(self.layers, self.features, self.recurrent)
        return whole if self.stage is None else [each for each in whole if each.past in self.stage.inputs]

    @property
    def cache(self) -> str:
        """The cache in words."""
        return f"a cache of {self.batch} x {self.capacity:,} positions"


def pass_layout(tensors: Iterable[Tensor], count: int, rows: int) -> Layout:
    """Return what stages give each other in a pass of `count` sequences with `rows` rows each."""
    names = {BATCH_DIM: count, ROWS_DIM: rows}
    return {each.name: (sized(each.shape, names), each.dtype) for each in tensors}


def layout_bytes(layout: Iterable[tuple[tuple[int, ...], str]]) -> int:
    """Return the size of tensors of these shapes and types."""
    return sum(math.prod(shape) * DTYPES[dtype].numpy.itemsize for shape, dtype in layout)


def check_memory(device: Device, sizes: Sizes, layout: Iterable[tuple[tuple[int, ...], str]]) -> None:
    """Check that a cache fits before it is allocated: systems overcommit memory, and kill the process that uses it.

    Args:
        layout: shape and type of each tensor of the cache.

    Raises:
        EngineError: it does not fit.
    """
    size = layout_bytes(layout)
    if size > (total := device.memory()[1]):
        raise EngineError(
            f"no memory for {sizes.cache}: it takes {size:,} bytes, and there are {total:,}",
            "build with a smaller --capacity or --batch",
        )
