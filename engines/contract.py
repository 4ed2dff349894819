"""The contract of step models: the names, types and shapes of their tensors. `engines/samplers.py` has those of samplers.

B is the batch, S the rows of the run (k+1 to verify, 1 to decode, a chunk of the prompt to prefill), L the window of the cache
that the run reads, C the capacity, Hkv and D the key/value heads of a layer and their width, V the width of the logits.

| tensor | type, shape | meaning |
|---|---|---|
| `input_ids` | int64 [B, S] | the tokens of the run; block heads: -1 for a row of the context |
| `positions` | int64 [B] | the index at which each sequence's first row is written |
| `key_positions` | int64 [L] | 0..L-1; its length is the window |
| `past_key_i`, `past_value_i` | [B, Hkv, C, D] | the cache of layer i, in the model's precision |
| `present_key_i`, `present_value_i` | [B, Hkv, C, D] | the same memory, after the run |
| `past_conv_i`, `present_conv_i` | [B, R, F] | rows that the convolution reads; recurrent layers only, down to `committed` |
| `past_rows_i`, `present_rows_i` | float32 [B, R, W] | the recurrence's inputs for rows that may be rejected |
| `past_state_i`, `present_state_i` | float32 [B, Hs, Dk, Dv] | the state after all rows that cannot be rejected |
| `pending` | int64 [B] | how many of the kept rows are confirmed but not yet in the state |
| `committed` | int64 [B] | how many rows enter the state: pending rows first, then rows of the run |
| `past_features`, `present_features` | [B, 1, C, H] | with a draft head: the target's features, see below |
| `feature_positions` | int64 [B] | draft heads only: the entry of the features that receives the last row's output |
| `logits` | float32 [B, S, V] | of all S rows |
| `logits_rows` | int64 [1] | optional, on the host: a backend may add it to compute only this many last rows of the logits |

A row attends to the keys at `key_positions <= positions + row`. Cache entries beyond that have no weight, so rejecting draft
tokens costs nothing: the next run writes from a smaller position. The entries must be finite, though, because zero times NaN
is NaN. A session clears a slot that met NaN. Engines do not check `positions + S <= C`, but sessions do.

A recurrent layer (a gated delta net, Mamba-2, a short convolution) cannot remove a row from its state, so rows enter the
state only once they are confirmed. Until then the model keeps W numbers per row, the recurrence's inputs: `past_rows_i` has
the rows after the state, and `past_conv_i` has the same rows as inputs of the convolution, preceded by the rows that the
convolution looks back on. A run places its own rows after the first `pending` of the kept rows. The first `committed` rows of
the result enter the state, and the others are kept. R is the length of the longest convolution, less 1, plus the number of
rows that may be kept. In a verifying run, the accepted rows are pending, and the row of the last confirmed token is committed
after them. All rows of a prompt are committed. So rejecting costs nothing here either: the state is written once per run, and
each accepted row is computed twice.

A draft head reads hidden states of the target. A feature is the H numbers that the head derives from the hidden states at one
position. The target writes a feature for each of its rows, like keys and values, whether or not the head drafts. Row i of the
head reads feature i and token i + 1, attends to its own cache up to entry i, and gives the logits of token i + 2. Where there
is no real feature yet, the head reads its own output for the row before. The last row of a pass writes that output to the
entry `feature_positions`: the next entry in a draft step, or one that is never used (C - 1) if real features follow.

A block head reads the feature of a row only where `input_ids` is -1, and derives only that row's key and value from it. These
rows, the context, come first. All other rows of a pass are the block: they have tokens, and attend to each other and to all
earlier keys. A head that drafts in one pass also writes features, but nothing reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import msgspec

from outrider.engines.precisions import PRECISIONS

CONTRACT_VERSION = 5

INPUT_IDS = "input_ids"
POSITIONS = "positions"
KEY_POSITIONS = "key_positions"
PENDING = "pending"
COMMITTED = "committed"
FEATURE_POSITIONS = "feature_positions"
PAST_FEATURES = "past_features"
LOGITS = "logits"
BLOCK_STATE = "block_state"
CONTEXT = -1  # in `input_ids` of a block head: the row is part of the context
LOGITS_ROWS = "logits_rows"
BOUNDARY = "boundary."  # with which the names of what stages pass on begin

BATCH_DIM = "batch"
ROWS_DIM = "rows"
WINDOW_DIM = "window"
CAPACITY_DIM = "capacity"
RECENT_DIM = "recent"

# Recurrences, as functions defined inside the graph: state S, key k, value v, decay g, update rate b, query q.
DOMAIN = "outrider"
GATED = "Gated"  # S_t = exp(g_t) S_{t-1} + k_t v_t^T, o_t = S_t^T q_t (Mamba-2)
GATED_DELTA = "GatedDelta"  # S_t = exp(g_t) S_{t-1} + b_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T, o_t = S_t^T q_t
ROWS = "Rows"  # suffix of the variants without rejected rows
EXPERTS = {4: "Int4Experts", 8: "Int8Experts"}  # functions for the experts of a mixture, by the bits of their weights

SMALLEST_WINDOW = 64


class Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One input or output of an engine. A dimension is a size, or a name if it varies."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


class StageBackend(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What built a stage, and runs it."""

    name: str
    version: str
    rewrites: dict[str, int] = {}  # as in a manifest's `build`


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Consecutive layers of a step model as a graph of their own, with tensors under the names that they have in the whole."""

    layers: tuple[int, int]  # the first and the last
    bytes: int  # of its weights, as exported
    inputs: list[str]  # those of the whole model's inputs that it has
    takes: list[Tensor]  # what the stage before gives; the first takes nothing
    gives: list[Tensor]  # the last gives only logits
    device: str | None = None  # such as cuda:1; None is that of the bundle
    threads: Annotated[int, msgspec.Meta(ge=1)] | None = None  # on a CPU; None is as many as its process may use
    backend: StageBackend | None = None  # None is that of the bundle


def sized(shape: Sequence[int | str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return a shape with each name replaced by its size."""
    return tuple(sizes[size] if isinstance(size, str) else size for size in shape)


class RecurrentLayer(NamedTuple):
    """The sizes of one sequence's state in a recurrent layer."""

    channels: int  # of its convolution
    history: int  # earlier rows that the convolution reads
    row: int = 0  # inputs of the recurrence per row; 0 if the layer is only a convolution
    heads: int = 0  # of its state
    key_width: int = 0
    value_width: int = 0


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One cache tensor of a step model: the input `past` and the output `present` are the same memory."""

    past: str
    present: str
    shape: tuple[int | str, ...]  # of one sequence: a dimension is a size, `CAPACITY_DIM` or `RECENT_DIM`
    dtype: str | None = None  # None is the model's

    @property
    def positional(self) -> bool:
        """Whether it has one entry per position."""
        return CAPACITY_DIM in self.shape

    def sizes(self, capacity: int, recent: int) -> tuple[int, ...]:
        """Return the shape for `capacity` positions and `recent` rows."""
        return sized(self.shape, {CAPACITY_DIM: capacity, RECENT_DIM: recent})


def step_rows(k: Sequence[int], one_pass: Sequence[int] = ()) -> list[int]:
    """Return the row counts of the step model passes in a round, ascending.

    Args:
        k: the built numbers of drafted tokens.
        one_pass: for a model that drafts k tokens in one pass, the possible rows of that pass beyond k and the context.
    """
    rows = {1, 2, *(each + 1 for each in k)}
    return sorted({context + each + more for context in rows for each in k for more in one_pass} | rows)


def recent_rows(recurrent: Sequence[RecurrentLayer], k: int) -> int:
    """Return R of the contract for rounds of up to `k` drafted tokens, or 0 without recurrent layers."""
    return max((layer.history + k for layer in recurrent), default=0)


def cache_tensors(
    layers: Sequence[tuple[int, int, int]], features: int | None = None, recurrent: Sequence[RecurrentLayer] = ()
) -> list[CacheTensor]:
    """Return the cache tensors of a model, in the order of its inputs.

    Args:
        layers: (key/value heads, key width, value width) of each layer with attention.
        features: width of the features that the model writes or reads; None if it has none.
        recurrent: the recurrent layers.
    """
    tensors = []

    def add(name: str, *shape: int | str, dtype: str | None = None) -> None:
        tensors.append(CacheTensor(f"past_{name}", f"present_{name}", shape, dtype))

    for index, (heads, key_width, value_width) in enumerate(layers):
        add(f"key_{index}", heads, CAPACITY_DIM, key_width)
        add(f"value_{index}", heads, CAPACITY_DIM, value_width)
    for index, layer in enumerate(recurrent):
        add(f"conv_{index}", RECENT_DIM, layer.channels)
        if layer.row:
            add(f"rows_{index}", RECENT_DIM, layer.row, dtype="float32")
            add(f"state_{index}", layer.heads, layer.key_width, layer.value_width, dtype="float32")
    if features is not None:
        add("features", 1, CAPACITY_DIM, features)
    return tensors


def step_tensors(
    layers: Sequence[tuple[int, int, int]],
    vocab_rows: int,
    precision: str,
    features: int | None = None,
    reads_features: bool = False,
    block_state: int | None = None,
    recurrent: Sequence[RecurrentLayer] = (),
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the inputs and outputs, in order, of a step model.

    Args:
        layers: (key/value heads, key width, value width) of each layer with attention.
        vocab_rows: width of the logits.
        precision: key of `PRECISIONS`.
        features: width of the features; None if the model has none.
        reads_features: whether the model is a draft head.
        block_state: width of the output for `markov`; None if there is no such head.
        recurrent: the recurrent layers.
    """
    cache, dtype = cache_tensors(layers, features, recurrent), PRECISIONS[precision].dtype
    more = [PENDING, COMMITTED] if recurrent else [FEATURE_POSITIONS] if reads_features else []
    inputs = [
        Tensor(INPUT_IDS, "int64", (BATCH_DIM, ROWS_DIM)),
        Tensor(POSITIONS, "int64", (BATCH_DIM,)),
        Tensor(KEY_POSITIONS, "int64", (WINDOW_DIM,)),
        *(Tensor(name, "int64", (BATCH_DIM,)) for name in more),
        *(Tensor(tensor.past, tensor.dtype or dtype, (BATCH_DIM, *tensor.shape)) for tensor in cache),
    ]
    outputs = [
        Tensor(LOGITS, "float32", (BATCH_DIM, ROWS_DIM, vocab_rows)),
        *(Tensor(tensor.present, tensor.dtype or dtype, (BATCH_DIM, *tensor.shape)) for tensor in cache),
        *([] if block_state is None else [Tensor(BLOCK_STATE, "float32", (BATCH_DIM, ROWS_DIM, block_state))]),
    ]
    return inputs, outputs


def window_buckets(capacity: int) -> list[int]:
    """Return an engine's windows: 64, 128, 256, ... below the capacity, then the capacity itself."""
    buckets = []
    window = SMALLEST_WINDOW
    while window < capacity:
        buckets.append(window)
        window *= 2
    return [*buckets, capacity]
