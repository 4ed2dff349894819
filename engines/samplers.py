"""The contract of samplers, the graphs that turn logits into tokens: the names, types and shapes of their tensors.

The `draft_sampler` runs after each draft step, and the `verifier` after a pass of the target. Both have a `greedy_` variant for
rounds whose requests all take the most likely tokens and change no logits. `logprobs` runs for requests that ask for them.
`export/graph/sampler.py` defines what they compute. A sixth graph, `markov`, runs before the draft sampler if a block head has
Markov and confidence heads; see `export/heads/markov.py`.

B is the batch, V the width of the logits (the draft's equals the target's), S the rows of the target's pass, N the entries of
the edit table, and K the candidates of top_k and top_p.

| tensor | type, shape | meaning |
|---|---|---|
| `logits` | float32 [B, S, V]; draft samplers [B, 1, V] | output of a step model |
| `drafted` | int64 [B, S] | the drafted tokens: the one after row i is at i; the rest is ignored |
| `drafted_count` | int64 [B] | the number of drafted tokens, 0..S-1; 0 is plain decoding |
| `first_row` | int64 [1] | draft sampler only: the number of tokens drafted so far |
| `q` | float32 [B, V] out of the draft sampler, [S, B, V] into the verifier | the distribution of each drafted token |
| `settings` | float32 [B, 8] | see `SETTINGS` |
| `edit_ids` | int64 [B, N] | tokens whose logits are edited; entries for the same token must be equal; N is at least 1 |
| `edits` | float32 [B, N, 4] | see `EDITS` |
| `uniforms` | float32 in [0, 1): [B, 2], verifier [B, S, 3] | to draw a block and a token; verifier: first, to accept |
| `candidates` | int64 [1] | K |
| `token` | int64 [B, 1] | the drafted token |
| `accepted` | int64 [B] | the number of leading drafted tokens that are accepted |
| `tokens` | int64 [B, S] | the accepted tokens, then the target's own token, then -1 |
| `status` | int64 [B] | `DECIDED`, `MORE_CANDIDATES` or `NOT_FINITE` |
| `logprobs` | float32 [B, S] | the natural logarithm of the target's probability of `tokens`, before edits and warping |
| `top_ids`, `top_logprobs` | [B, S, n] | the n most likely tokens, where n is `candidates`; `FORBIDDEN` where a logit is -inf |
| `block_state` | float32 [B, S, A] out of the step model, [B, 1, A] into `markov` | the input of its heads |
| `before` | int64 [B, 1] | `markov` only: the token before the row's token |
| `biased` | float32 [B, 1, V] | the logits that the draft sampler reads in place of the model's |
| `confidence` | float32 [B, 1] | the probability that the row's token is accepted |
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from outrider.engines.contract import BLOCK_STATE, Tensor, sized
from outrider.engines.device import Buffer, Device, host_buffer

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
    "seen",  # 1 if the prompt or the answer has it
    "banned_rows",  # in rows before this one the logit is minus infinity
)

DECIDED = 0
MORE_CANDIDATES = 1  # top_k or top_p reaches beyond the candidates: run again with more
NOT_FINITE = 2  # the logits contain NaN or infinity

# The least of `top_logprobs`: ONNX Runtime on CUDA sorts -inf after the padding of its TopK, the lowest float without an id.
FORBIDDEN = -1e30

SAMPLERS = ("draft_sampler", "verifier", "greedy_draft_sampler", "greedy_verifier", "logprobs")
DRAFT_SAMPLERS = ("draft_sampler", "greedy_draft_sampler")  # indexed by whether the round is greedy
MARKOV = "markov"  # only with block heads that have a Markov head

BLOCK = 256  # tokens per first-level sum when a token is drawn

# top_p nearly always ends within the first number of candidates. If not, the graph reports it and is run again with the next
# number, and finally with all tokens. TensorRT's TopK supports at most 3840.
CANDIDATES = (256, 1024, 3840)


def sampler_tensors(sampler: str, vocab_rows: int, block_state: int | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """Return the inputs and outputs, in order, of one of `SAMPLERS` or of `MARKOV`.

    Args:
        vocab_rows: width of the logits.
        block_state: width of the input `block_state` of `MARKOV`.
    """
    logits = Tensor("logits", "float32", ("batch", "rows", vocab_rows))
    row = Tensor("logits", "float32", ("batch", 1, vocab_rows))
    drafted = Tensor("drafted", "int64", ("batch", "rows"))
    count = Tensor("drafted_count", "int64", ("batch",))
    request = [
        Tensor("settings", "float32", ("batch", len(SETTINGS))),
        Tensor("edit_ids", "int64", ("batch", "edits")),
        Tensor("edits", "float32", ("batch", "edits", len(EDITS))),
    ]
    candidates = Tensor("candidates", "int64", (1,))
    token = Tensor("token", "int64", ("batch", 1))
    tokens = Tensor("tokens", "int64", ("batch", "rows"))
    status = Tensor("status", "int64", ("batch",))
    verdict = [Tensor("accepted", "int64", ("batch",)), tokens, status]
    if sampler == "greedy_draft_sampler":
        return [row], [token, status]
    if sampler == "greedy_verifier":
        return [logits, drafted, count], verdict
    if sampler == "draft_sampler":
        first_row, uniforms = Tensor("first_row", "int64", (1,)), Tensor("uniforms", "float32", ("batch", 2))
        q = Tensor("q", "float32", ("batch", vocab_rows))
        return [row, drafted, first_row, *request, uniforms, candidates], [token, q, status]
    if sampler == "verifier":
        q, uniforms = Tensor("q", "float32", ("rows", "batch", vocab_rows)), Tensor("uniforms", "float32", ("batch", "rows", 3))
        return [logits, drafted, count, q, *request, uniforms, candidates], verdict
    if sampler == MARKOV:
        assert block_state is not None
        state, before = Tensor(BLOCK_STATE, "float32", ("batch", 1, block_state)), Tensor("before", "int64", ("batch", 1))
        biased = Tensor("biased", "float32", ("batch", 1, vocab_rows))
        return [row, state, before], [biased, Tensor("confidence", "float32", ("batch", 1))]
    top = ("batch", "rows", "top")
    logprobs = Tensor("logprobs", "float32", ("batch", "rows"))
    return [logits, tokens, candidates], [logprobs, Tensor("top_ids", "int64", top), Tensor("top_logprobs", "float32", top)]


def sampler_buffers(
    device: Device, sampler: str, sizes: Mapping[str, int], vocab_rows: int, block_state: int | None = None
) -> dict[str, Buffer]:
    """Allocate the tensors of a sampler, by name. All are zero, except for `candidates`: it is 1, and in host memory.

    Args:
        sizes: the sizes of `batch`, `rows`, `edits` and `top`.
    """
    inputs, outputs = sampler_tensors(sampler, vocab_rows, block_state)
    buffers = {
        each.name: device.zeros(sized(each.shape, sizes), each.dtype, "the samplers")
        for each in (*inputs, *outputs)
        if each.name != "candidates"
    }
    return buffers | {each.name: host_buffer(np.ones(1, np.int64)) for each in inputs if each.name == "candidates"}
