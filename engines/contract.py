"""The contract of the engines: the names, types and shapes of their tensors, which every stage relies on.

The step model
--------------
B is the batch, S the rows of the run (k+1 to verify, 1 to decode, a chunk of the prompt to prefill), L the window of the cache
that the run reads, C the capacity, Hkv and D the key/value heads of a layer and their width, V the width of the logits.

| tensor | type, shape | meaning |
|---|---|---|
| `input_ids` | int64 [B, S] | the tokens of the run; block heads: -1 for a row of the context |
| `positions` | int64 [B] | the index at which each sequence's first row is written |
| `key_positions` | int64 [L] | 0..L-1; its length is the window |
| `past_key_i`, `past_value_i` | [B, Hkv, C, D] | the cache of layer i, in the model's precision |
| `present_key_i`, `present_value_i` | [B, Hkv, C, D] | the same memory, after the run |
| `past_conv_i`, `present_conv_i` | [B, R, F] | recurrent layers only, here and below: rows that the convolution reads |
| `past_rows_i`, `present_rows_i` | float32 [B, R, W] | what the recurrence takes of rows that may be rejected |
| `past_state_i`, `present_state_i` | float32 [B, Hs, Dk, Dv] | the state after all rows that cannot be |
| `pending` | int64 [B] | how many confirmed rows are kept behind the state |
| `committed` | int64 [B] | how many of these and the run's rows go into the state |
| `past_features`, `present_features` | [B, 1, C, H] | with a draft head: what the head reads of the target; see below |
| `feature_positions` | int64 [B] | draft heads only: the entry of the features that the last row's output is written to |
| `logits` | float32 [B, S, V] | of all S rows |
| `logits_rows` | int64 [1] | optional, on the host: a backend may add it, to get the logits of that many last rows |

A row attends to the keys at `key_positions <= positions + row`. What the cache holds beyond has no weight, so rejecting draft
tokens costs nothing: the next run writes from a smaller position. It must be finite, though, since zero times NaN is NaN; a
session that met NaN is cleared. Engines do not check `positions + S <= C`, but sessions do.

A recurrent layer (a gated delta net, Mamba-2, a short convolution) cannot take a row back from its state, so rows enter the
state only when they are confirmed. Until then, what the recurrence takes of them is kept, W numbers for each: `past_rows_i` has
the rows behind the state, and `past_conv_i` has the same rows, as they enter the convolution, behind those that it reads before
them. A run computes its own rows after the first `pending` of the kept ones; then the first `committed` of these and its own
are in the state, and the rest are kept. R is the sum of the longest convolution less 1, and of the rows that may be kept.
To verify, the rows that were accepted are pending, and the last confirmed token's own is committed after them. All rows of a
prompt are committed. So rejecting costs nothing here either, a state is written once a run, and what is computed twice is one
update of the state for each accepted row.

A draft head reads hidden states of the target. What it makes of those of a position, H numbers, is a feature: the target
writes one for each of its rows, as it writes keys and values, whether or not the head drafts. Row i of the head reads feature i
and the token i + 1, attends to its own cache up to entry i, and gives the logits of token i + 2. Where there is no real feature
yet, the head reads its own output for the row before: the last row of a pass writes it to the entry `feature_positions`, which
is the next one in a draft step, and one whose content has no effect (C - 1) where the features that follow are real.

A block head reads the feature of a row only where `input_ids` is -1, and makes of it nothing but that row's key and value.
These rows, the context, come first. All other rows of a pass are the block: they have tokens, and see each other and all keys
before them. What a head that drafts in one pass writes to the features is never read.

The samplers
------------
Five graphs turn logits into tokens: the `drafter` after each draft step, the `verifier` after a pass of the
target, a `greedy_` variant of both for requests that take the most likely tokens and change no logits, and `logprobs` for
requests that ask for them. `export/graph/sampler.py` has what they compute. A sixth, `markov`, comes before the drafter where a
block head has heads of its own; see `export/heads/markov.py`. V is the width of the logits, of the draft's as of the
target's, S the rows of the target's pass, N the entries of the edit table, and K the candidates of top_k and top_p.

| tensor | type, shape | meaning |
|---|---|---|
| `logits` | float32 [B, S, V]; drafters [B, 1, V] | of a step model |
| `drafted` | int64 [B, S] | the drafted tokens: the one after row i is at i; the rest is ignored |
| `drafted_count` | int64 [B] | how many there are, 0..S-1; 0 is plain decoding |
| `first_row` | int64 [1] | drafter only: how many tokens have been drafted already |
| `q` | float32 [B, V] out of the drafter, [S, B, V] into the verifier | what each drafted token was drawn from |
| `settings` | float32 [B, 8] | see `SETTINGS` |
| `edit_ids` | int64 [B, N] | tokens whose logits are changed; entries of one token must be equal; N at least 1 |
| `edits` | float32 [B, N, 4] | see `EDITS` |
| `uniforms` | float32 in [0, 1): drafter [B, 2], verifier [B, S, 3] | drawing a block and a token; verifier: accepting first |
| `candidates` | int64 [1] | K |
| `token` | int64 [B, 1] | the drafted token |
| `accepted` | int64 [B] | how many drafted tokens are accepted, from the first on |
| `tokens` | int64 [B, S] | these, then the target's own token, then -1 |
| `status` | int64 [B] | `DECIDED`, `MORE_CANDIDATES` or `NOT_FINITE` |
| `logprobs` | float32 [B, S] | the natural logarithm of the target's probability of `tokens`, before edits and warping |
| `top_ids`, `top_logprobs` | [B, S, n] | the n most likely tokens, where n is `candidates` |
| `block_state` | float32 [B, S, A] out of the step model, [B, 1, A] into `markov` | what its heads read of a row |
| `before` | int64 [B, 1] | `markov` only: the token before the row's own |
| `biased` | float32 [B, 1, V] | the logits that the drafter reads instead |
| `confidence` | float32 [B, 1] | the probability that the row's token is accepted |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider.engines.precisions import PRECISIONS

CONTRACT_VERSION = 4

INPUT_IDS = "input_ids"
POSITIONS = "positions"
KEY_POSITIONS = "key_positions"
PENDING = "pending"
COMMITTED = "committed"
FEATURE_POSITIONS = "feature_positions"
PAST_FEATURES = "past_features"
PRESENT_FEATURES = "present_features"
LOGITS = "logits"
BLOCK_STATE = "block_state"
CONTEXT = -1  # in `input_ids` of a block head: the row is one of the context
LOGITS_ROWS = "logits_rows"

BATCH_DIM = "batch"
ROWS_DIM = "rows"
WINDOW_DIM = "window"
CAPACITY_DIM = "capacity"
RECENT_DIM = "recent"

# The recurrences, as functions that a graph defines itself: state S, key k, value v, decay g, update rate b, query q.
DOMAIN = "outrider"
GATED = "Gated"  # S_t = exp(g_t) S_{t-1} + k_t v_t^T, o_t = S_t^T q_t (Mamba-2)
GATED_DELTA = "GatedDelta"  # S_t = exp(g_t) S_{t-1} + b_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T, o_t = S_t^T q_t
ROWS = "Rows"  # at the end of the names of those that know of no rejected rows
EXPERTS = {4: "Int4Experts", 8: "Int8Experts"}  # functions, too: the experts of a mixture, by the bits of their weights

SMALLEST_WINDOW = 64

SETTINGS = (
    "temperature",  # 0 is greedy
    "top_k",  # 0 keeps all
    "top_p",  # 1 keeps all
    "min_p",  # 0 keeps all
    "repetition_penalty",  # 1 changes nothing
    "presence_penalty",
    "frequency_penalty",
    "exact_match",  # the acceptance rule: 0 rejection, 1 exact-match
)
EDITS = (
    "bias",  # added to the logit
    "count",  # how often the answer has the token
    "seen",  # 1 where prompt or answer has it
    "banned_rows",  # in rows before this one its logit is minus infinity
)

DECIDED = 0
MORE_CANDIDATES = 1  # top_k or top_p reach beyond the candidates; run it again with more
NOT_FINITE = 2  # the logits contain NaN or infinity

SAMPLERS = ("drafter", "verifier", "greedy_drafter", "greedy_verifier", "logprobs")
DRAFT_SAMPLERS = ("drafter", "greedy_drafter")  # by whether the round is greedy
MARKOV = "markov"  # a further one, which only some block heads have

BLOCK = 256  # tokens that share a first-level sum when one is drawn

# top_p nearly always ends within this many candidates. Where it does not, the graph reports it and is run again with more, and
# finally with all. TensorRT's TopK supports at most 3840.
CANDIDATES = (256, 1024, 3840)


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input or output of an engine. A dimension is a size, or a name where it varies."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


class RecurrentLayer(NamedTuple):
    """The sizes of what a recurrent layer keeps of a sequence."""

    channels: int  # of its convolution
    history: int  # rows before its own that the convolution reads
    row: int = 0  # numbers that its recurrence takes of a row; 0 if the layer is a convolution and no more
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
        """Whether it has an entry for each position."""
        return CAPACITY_DIM in self.shape

    def sizes(self, capacity: int, recent: int) -> tuple[int, ...]:
        """Return the shape for so many positions, and so many recent rows."""
        known = {CAPACITY_DIM: capacity, RECENT_DIM: recent}
        return tuple(known[size] if isinstance(size, str) else size for size in self.shape)


def step_rows(k: Sequence[int], one_pass: Sequence[int] = ()) -> list[int]:
    """Return the numbers of rows that rounds run step models with, ascending.

    Args:
        k: the built numbers of drafted tokens.
        one_pass: if the model drafts k tokens in one pass, the rows that this may have, less k and those of its context.
    """
    rows = {1, 2, *(each + 1 for each in k)}
    return sorted({context + each + more for context in rows for each in k for more in one_pass} | rows)


def recent_rows(recurrent: Sequence[RecurrentLayer], k: int) -> int:
    """Return R of the contract for rounds of up to `k` drafted tokens; 0 without recurrent layers."""
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
        block_state: width of what it gives to `markov`; None if it has no such heads.
        recurrent: the recurrent layers.
    """
    cache, own = cache_tensors(layers, features, recurrent), PRECISIONS[precision].dtype
    further = [PENDING, COMMITTED] if recurrent else [FEATURE_POSITIONS] if reads_features else []
    inputs = [
        Tensor(INPUT_IDS, "int64", (BATCH_DIM, ROWS_DIM)),
        Tensor(POSITIONS, "int64", (BATCH_DIM,)),
        Tensor(KEY_POSITIONS, "int64", (WINDOW_DIM,)),
        *(Tensor(name, "int64", (BATCH_DIM,)) for name in further),
        *(Tensor(tensor.past, tensor.dtype or own, (BATCH_DIM, *tensor.shape)) for tensor in cache),
    ]
    outputs = [
        Tensor(LOGITS, "float32", (BATCH_DIM, ROWS_DIM, vocab_rows)),
        *(Tensor(tensor.present, tensor.dtype or own, (BATCH_DIM, *tensor.shape)) for tensor in cache),
        *([] if block_state is None else [Tensor(BLOCK_STATE, "float32", (BATCH_DIM, ROWS_DIM, block_state))]),
    ]
    return inputs, outputs


def window_buckets(capacity: int) -> list[int]:
    """Return the windows that an engine runs with: 64, 128, 256, ... below the capacity, then the capacity itself."""
    buckets = []
    window = SMALLEST_WINDOW
    while window < capacity:
        buckets.append(window)
        window *= 2
    return [*buckets, capacity]


def sampler_tensors(sampler: str, vocab_rows: int, block_state: int | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """Return the inputs and outputs, in order, of one of `SAMPLERS` or of `MARKOV`, for logits of the width `vocab_rows`;
    `block_state` is the width of what the latter reads of a row."""
    drafted = Tensor("drafted", "int64", ("batch", "rows"))
    request = [
        Tensor("settings", "float32", ("batch", len(SETTINGS))),
        Tensor("edit_ids", "int64", ("batch", "edits")),
        Tensor("edits", "float32", ("batch", "edits", len(EDITS))),
    ]
    candidates = Tensor("candidates", "int64", (1,))
    logits = Tensor("logits", "float32", ("batch", "rows", vocab_rows))
    status = Tensor("status", "int64", ("batch",))
    token = Tensor("token", "int64", ("batch", 1))
    count = Tensor("drafted_count", "int64", ("batch",))
    verdict = [Tensor("accepted", "int64", ("batch",)), Tensor("tokens", "int64", ("batch", "rows")), status]
    if sampler == "greedy_drafter":
        return [Tensor("logits", "float32", ("batch", 1, vocab_rows))], [token, status]
    if sampler == "greedy_verifier":
        return [logits, drafted, count], verdict
    if sampler == "drafter":
        return [
            Tensor("logits", "float32", ("batch", 1, vocab_rows)),
            drafted,
            Tensor("first_row", "int64", (1,)),
            *request,
            Tensor("uniforms", "float32", ("batch", 2)),
            candidates,
        ], [token, Tensor("q", "float32", ("batch", vocab_rows)), status]
    if sampler == "verifier":
        return [
            logits,
            drafted,
            count,
            Tensor("q", "float32", ("rows", "batch", vocab_rows)),
            *request,
            Tensor("uniforms", "float32", ("batch", "rows", 3)),
            candidates,
        ], verdict
    if sampler == MARKOV:
        assert block_state is not None
        row = Tensor("logits", "float32", ("batch", 1, vocab_rows))
        state, before = Tensor(BLOCK_STATE, "float32", ("batch", 1, block_state)), Tensor("before", "int64", ("batch", 1))
        biased = Tensor("biased", "float32", ("batch", 1, vocab_rows))
        return [row, state, before], [biased, Tensor("confidence", "float32", ("batch", 1))]
    top = ("batch", "rows", "top")
    return [logits, Tensor("tokens", "int64", ("batch", "rows")), candidates], [
        Tensor("logprobs", "float32", ("batch", "rows")),
        Tensor("top_ids", "int64", top),
        Tensor("top_logprobs", "float32", top),
    ]
