"""The step model's contract: the names, types and shapes of an engine's tensors, which every stage agrees on.

B is the batch, S the rows of this run (k+1 to verify, 1 to decode, a chunk to prefill), L the window of the cache
that this run looks at, C the capacity, Hkv and D the key/value heads of one layer and their width, V the vocabulary
rows of the model's head.

| tensor | type, shape | meaning |
|---|---|---|
| `input_ids` | int64 [B, S] | the tokens of this run |
| `positions` | int64 [B] | index at which each sequence's first row is written |
| `key_positions` | int64 [L] | 0..L-1; its length is the window |
| `past_key_i`, `past_value_i` | [B, Hkv, C, D] | the cache of layer i, in the engine's precision |
| `present_key_i`, `present_value_i` | [B, Hkv, C, D] | the same memory, after this run |
| `logits` | float32 [B, S, V] | all S rows |

A row sees the keys at `key_positions <= positions + row`. Whatever lies in the cache past that weighs nothing, so rejecting
draft tokens costs nothing: the next run writes from a smaller position. (It must be finite, though: nothing times NaN is
NaN. So a session that met NaN is cleared.) Engines do not check
`positions + S <= C`; sessions do.
"""

from __future__ import annotations

from dataclasses import dataclass

CONTRACT_VERSION = 1

INPUT_IDS = "input_ids"
POSITIONS = "positions"
KEY_POSITIONS = "key_positions"
LOGITS = "logits"

BATCH_DIM = "batch"
ROWS_DIM = "rows"
WINDOW_DIM = "window"
CAPACITY_DIM = "capacity"

SMALLEST_WINDOW = 64


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One cache tensor of a step model, `past` in and `present` out over the same memory."""

    past: str
    present: str
    heads: int
    width: int


def cache_tensors(layers: list[tuple[int, int, int]]) -> list[CacheTensor]:
    """The cache tensors of a model, in the order of its inputs.

    `layers` holds (key/value heads, key width, value width) for each layer.
    """
    tensors = []
    for index, (heads, key_width, value_width) in enumerate(layers):
        tensors.append(CacheTensor(f"past_key_{index}", f"present_key_{index}", heads, key_width))
        tensors.append(CacheTensor(f"past_value_{index}", f"present_value_{index}", heads, value_width))
    return tensors


def window_buckets(capacity: int) -> list[int]:
    """The windows an engine is run with: doubling from 64, the last one the capacity itself."""
    buckets = []
    window = SMALLEST_WINDOW
    while window < capacity:
        buckets.append(window)
        window *= 2
    return [*buckets, capacity]
