"""Samplers as ONNX graphs. They turn logits into tokens next to the model, on any backend.

For every row x of logits (the tensors are in `engines.samplers`):

1. *Edits*: bias, bans and penalties, as in vLLM and in its order. A row sees the draft tokens before it.
2. *Warping*: e = exp((x - max x) / temperature). The tokens with e >= min_p are kept; among these the top_k greatest; among
   these the fewest whose share reaches top_p. Tokens equal to the last kept one are kept too. Then p = w / sum w, where w is e
   for kept tokens and 0 for the others.
3. *Drawing*: by the inverse CDF in two levels: first a block of 256 tokens, then a token of the block, each with its own
uniform
   number. This makes fp32 exact enough for any vocabulary, and a token of weight 0 is never drawn.
4. *Accepting*, by one of two rules. Rejection: a token d drawn from q is accepted if u q(d) < p(d). Otherwise the target's own
   token is drawn from max(0, p - q), and after the last draft token from p (Leviathan et al. 2023, algorithm 1; Chen et al.
   2023, theorem 1). Exact match: the target's own token is drawn from p, and d is accepted if it is the same token. At
   temperature 0, both rules accept d if it is the most likely token. The `greedy_` graphs do only that.

The graphs use only operators that TensorRT supports: no NonZero, Multinomial, CumProd, scatter with a reduction, If or Loop.
The number of candidates for TopK is an input, because TensorRT's limit is 3840.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import GraphBuilder

from outrider.engines.samplers import (
    BLOCK,
    DECIDED,
    FORBIDDEN,
    MORE_CANDIDATES,
    NOT_FINITE,
    SAMPLERS,
    SETTINGS,
    sampler_tensors,
)

OPSET = 21
INT64 = ir.DataType.INT64
FLOAT = ir.DataType.FLOAT
LARGEST = 3e38  # no finite sum of weights is above it
Value = Any  # an `ir.Value`; GraphBuilder's nodes are typed as Any


class Graph:
    """A graph under construction. Methods state the shapes; `op` adds a node."""

    def __init__(self, vocab_rows: int) -> None:
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="sampler")
        self.builder = GraphBuilder(self.graph)
        self.op: Any = self.builder.op
        self.vocab_rows = vocab_rows

    def size(self, x: Value, axis: int) -> Value:
        """Return the size [1] of one axis."""
        return self.op.Shape(x, start=axis, end=axis + 1)

    def indices(self, size: Value) -> Value:
        """Return 0..size-1."""
        return self.op.Range(0, self.op.Squeeze(size), 1)

    def settings(self, settings: Value) -> dict[str, Value]:
        """Return the settings by name, each [B, 1, 1]."""
        columns = self.op.Split(self.op.Unsqueeze(settings, [1]), [1] * len(SETTINGS), axis=2, _outputs=len(SETTINGS))
        return dict(zip(SETTINGS, columns, strict=True))

    def floats(self, x: Value) -> Value:
        return self.op.Cast(x, to=FLOAT)

    def count(self, x: Value, axis: int) -> Value:
        """Count true values along `axis`, and keep the axis with size 1."""
        return self.op.ReduceSum(self.op.Cast(x, to=INT64), [axis], keepdims=1)

    def edit(self, logits: Value, drafted: Value, row: Value, inputs: dict[str, Value], settings: dict[str, Value]) -> Value:
        """Return logits [B, S, V] with bias, bans and penalties; row s sees the first `row[s]` of the drafted tokens [B, D]."""
        op = self.op
        table_ids, table = inputs["edit_ids"], inputs["edits"]
        # The edits of the draft tokens, if the table has any.
        entry = self.indices(self.size(table_ids, 1))
        listed = op.Equal(op.Unsqueeze(drafted, [2]), op.Unsqueeze(table_ids, [1]))  # [B, D, N]
        index = op.ReduceMax(op.Where(listed, entry, op.Constant(value_int=-1)), [2], keepdims=1)  # [B, D, 1]
        looked_up = op.GatherElements(table, op.Expand(op.Max(index, [0]), [1, 1, 4]), axis=1)
        looked_up = op.Where(op.GreaterOrEqual(index, [0]), looked_up, 0.0)
        ids = op.Concat(table_ids, drafted, axis=1)  # [B, M], M = N + D
        values = op.Transpose(op.Concat(table, looked_up, axis=1), perm=[0, 2, 1])  # [B, 4, M]
        bias, count, seen, banned_rows = op.Split(values, [1, 1, 1, 1], axis=1, _outputs=4)  # [B, 1, M]
        # How often each token occurs among the draft tokens before each row.
        place = op.Unsqueeze(row, [0, 2])  # [1, S, 1]
        before = self.floats(op.Less(self.indices(self.size(drafted, 1)), place))  # [1, S, D]
        same = self.floats(op.Equal(op.Unsqueeze(drafted, [2]), op.Unsqueeze(ids, [1])))  # [B, D, M]
        more = op.MatMul(before, same)  # [B, S, M], like all that follow
        count = op.Add(count, more)
        seen = op.Greater(op.Add(seen, more), 0.0)
        at = op.Expand(op.Unsqueeze(ids, [1]), op.Shape(count))
        x = op.Add(op.GatherElements(logits, at, axis=2), bias)
        x = op.Where(op.Less(self.floats(place), banned_rows), float("-inf"), x)
        repetition = settings["repetition_penalty"]
        x = op.Where(seen, op.Where(op.Greater(x, 0.0), op.Div(x, repetition), op.Mul(x, repetition)), x)
        x = op.Sub(x, op.Mul(settings["frequency_penalty"], count))
        x = op.Sub(x, op.Mul(settings["presence_penalty"], self.floats(op.Greater(count, 0.0))))
        return op.ScatterElements(logits, at, x, axis=2)

    def warp(self, x: Value, settings: dict[str, Value], candidates: Value) -> tuple[Value, Value, Value]:
        """Return weights [B, S, V], their sums [B, S], and the state [B, S] of each row."""
        op = self.op
        temperature, top_p = settings["temperature"], settings["top_p"]
        top_k = op.Cast(settings["top_k"], to=INT64)
        scale = op.Reciprocal(op.Where(op.Greater(temperature, 0.0), temperature, 1.0))
        e = op.Exp(op.Mul(op.Sub(x, op.ReduceMax(x, [2], keepdims=1)), scale))
        best, _ = op.TopK(e, candidates, axis=2, _outputs=2)  # [B, S, K], greatest first
        size = self.size(best, 2)
        rows = op.Concat(op.Shape(best, end=2), [1], axis=0)  # B, S, 1
        kth = op.Expand(op.Sub(op.Min(op.Max(top_k, [1]), size), [1]), rows)
        kth = op.Where(op.Greater(top_k, [0]), op.GatherElements(best, kth, axis=2), 0.0)
        floor = op.Max(kth, settings["min_p"])  # [B, S, 1]
        # Drop tokens below the floor instead of keeping tokens above it, so that NaN stays in the weights and the state shows
        # it.
        total = op.ReduceSum(op.Where(op.Less(e, floor), 0.0, e), [2], keepdims=1)
        share = op.CumSum(op.Where(op.Less(best, floor), 0.0, best), op.Constant(value_int=2))
        short = self.count(op.Less(share, op.Mul(top_p, total)), 2)  # candidates before the share reaches top_p
        last = op.GatherElements(best, op.Min(short, op.Sub(size, [1])), axis=2)
        limited = op.Less(top_p, 1.0)
        floor = op.Max(floor, op.Where(limited, last, 0.0))
        weights = op.Where(op.Less(e, floor), 0.0, e)
        beyond = op.Or(op.Greater(top_k, size), op.And(limited, op.Equal(short, size)))
        wide = op.And(beyond, op.Less(size, [self.vocab_rows]))
        total = op.ReduceSum(weights, [2], keepdims=1)
        finite = op.Less(total, LARGEST)  # also false for NaN
        state = op.Where(finite, op.Where(wide, [MORE_CANDIDATES], [DECIDED]), [NOT_FINITE])
        return weights, op.Squeeze(total, [2]), op.Squeeze(state, [2])

    def most_likely(self, logits: Value) -> tuple[Value, Value]:
        """Return the most likely tokens [B, S] of logits [B, S, V], and the state [B, S] of each row."""
        finite = self.op.Less(self.op.ReduceSum(logits, [2], keepdims=0), LARGEST)  # also false for NaN
        return self.op.ArgMax(logits, axis=2, keepdims=0), self.op.Where(finite, [DECIDED], [NOT_FINITE])

    def accept(self, correct: Value, drafted_count: Value, row: Value) -> Value:
        """Return the number [B, 1] of draft tokens before the first one that is not `correct` [B, S].

        The result is at most the number of draft tokens [B], so it is below S. `row` [S] is the index of each row.
        """
        kept = self.op.And(correct, self.op.Less(row, self.op.Unsqueeze(drafted_count, [1])))
        failures = self.op.CumSum(self.op.Cast(self.op.Not(kept), to=INT64), self.op.Constant(value_int=1))
        return self.count(self.op.Equal(failures, [0]), 1)

    def verdict(self, accepted: Value, drafted: Value, own: Value, state: Value, row: Value) -> list[Value]:
        """Return accepted, tokens, status: the accepted draft tokens [B, S], then the target's `own` token.

        `own` is [B, 1], or [B, S] to use the token at the row after the accepted ones.
        """
        op = self.op
        tokens = op.Where(op.Less(row, accepted), drafted, op.Where(op.Equal(row, accepted), own, [-1]))
        status = op.ReduceMax(op.Where(op.LessOrEqual(row, accepted), state, [DECIDED]), [1], keepdims=0)
        return [op.Squeeze(accepted, [1]), tokens, status]

    def draw(self, weights: Value, uniforms: Value) -> Value:
        """Draw tokens [B, S] from weights [B, S, V], each with two uniforms [B, S, 2]."""
        op = self.op
        padding = -self.vocab_rows % BLOCK
        if padding:
            weights = op.Pad(weights, [0, 0, 0, 0, 0, padding])
        blocks = op.Reshape(weights, [0, 0, -1, BLOCK])
        first, second = op.Split(uniforms, [1, 1], axis=2, _outputs=2)
        count = (self.vocab_rows + padding) // BLOCK
        block = self.pick(op.ReduceSum(blocks, [3], keepdims=0), count, first)  # [B, S, 1]
        at = op.Expand(op.Unsqueeze(block, [3]), [1, 1, 1, BLOCK])
        inside = self.pick(op.Squeeze(op.GatherElements(blocks, at, axis=2), [2]), BLOCK, second)
        return op.Squeeze(op.Add(op.Mul(block, [BLOCK]), inside), [2])

    def pick(self, weights: Value, count: int, uniforms: Value) -> Value:
        """Return the index [B, S, 1] of the weight [B, S, count] at the share `uniforms` [B, S, 1] of their sum."""
        op = self.op
        index = list(range(count))
        share = op.CumSum(weights, op.Constant(value_int=2))
        sought = op.Mul(uniforms, op.ReduceMax(share, [2], keepdims=1))
        positive = op.Greater(weights, 0.0)
        past = op.And(positive, op.Greater(share, sought))
        first = op.ReduceMin(op.Where(past, index, [count]), [2], keepdims=1)
        last = op.ReduceMax(op.Where(positive, index, [0]), [2], keepdims=1)
        return op.Min(first, last)  # the last token with a weight, if rounding left no share above the one sought


def draft_sampler(graph: Graph, inputs: dict[str, Value]) -> list[Value]:
    """Return token, q, status: a token drawn from the draft's warped distribution q."""
    op = graph.op
    settings = graph.settings(inputs["settings"])
    x = graph.edit(inputs["logits"], inputs["drafted"], inputs["first_row"], inputs, settings)
    weights, total, state = graph.warp(x, settings, inputs["candidates"])
    sampled = op.Squeeze(op.Greater(settings["temperature"], 0.0), [2])
    own = graph.draw(weights, op.Unsqueeze(inputs["uniforms"], [1]))
    token = op.Where(sampled, own, op.ArgMax(x, axis=2, keepdims=0))
    return [token, op.Div(op.Squeeze(weights, [1]), total), op.Squeeze(state, [1])]


def verifier(graph: Graph, inputs: dict[str, Value]) -> list[Value]:
    """Return accepted, tokens, status: the accepted prefix of the draft tokens, and the target's own token after it."""
    op, drafted, q = graph.op, inputs["drafted"], inputs["q"]
    settings = graph.settings(inputs["settings"])
    accepting, drawing = op.Split(inputs["uniforms"], [1, 2], axis=2, _outputs=2)
    row = graph.indices(graph.size(drafted, 1))  # [S]
    x = graph.edit(inputs["logits"], drafted, row, inputs, settings)
    weights, total, state = graph.warp(x, settings, inputs["candidates"])
    greedy = op.Squeeze(op.LessOrEqual(settings["temperature"], 0.0), [2])  # [B, 1]
    exact = op.Or(greedy, op.Squeeze(op.Greater(settings["exact_match"], 0.0), [2]))
    own = op.Where(greedy, op.ArgMax(x, axis=2, keepdims=0), graph.draw(weights, drawing))  # [B, S]

    # The draft tokens to accept: u q < p, with both sides multiplied by the sum of the weights.
    w_drafted = op.Squeeze(op.GatherElements(weights, op.Unsqueeze(drafted, [2]), axis=2), [2])
    q_drafted = op.GatherElements(q, op.Unsqueeze(op.Transpose(drafted, perm=[1, 0]), [2]), axis=2)  # [S, B, 1]
    q_drafted = op.Transpose(op.Squeeze(q_drafted, [2]), perm=[1, 0])
    likely = op.Less(op.Mul(op.Mul(op.Squeeze(accepting, [2]), q_drafted), total), w_drafted)
    correct = op.Or(op.And(exact, op.Equal(drafted, own)), op.And(op.Not(exact), likely))
    accepted = graph.accept(correct, inputs["drafted_count"], row)

    # The target's own token, drawn from max(0, p - q) at the row of the first rejected token.
    rows, batch = graph.size(drafted, 1), graph.size(drafted, 0)
    sequence = op.Unsqueeze(graph.indices(batch), [1])
    flat = [-1, graph.vocab_rows]
    w_there = op.Gather(op.Reshape(weights, flat), op.Add(op.Mul(sequence, rows), accepted), axis=0)  # [B, 1, V]
    q_there = op.Gather(op.Reshape(q, flat), op.Add(op.Mul(accepted, batch), sequence), axis=0)
    total_there = op.Unsqueeze(op.GatherElements(total, accepted, axis=1), [2])
    residual = op.Max(op.Sub(w_there, op.Mul(q_there, total_there)), 0.0)
    at = op.Expand(op.Unsqueeze(accepted, [2]), [1, 1, 2])
    resampled = graph.draw(residual, op.GatherElements(drawing, at, axis=1))  # [B, 1]
    # If p and q are equal, rounding may reject a token and leave no residual. Then drawing from p is correct too.
    has_residual = op.Greater(op.ReduceMax(residual, [2], keepdims=0), 0.0)
    rejected = op.Less(accepted, op.Unsqueeze(inputs["drafted_count"], [1]))
    use_residual = op.And(op.And(op.Not(exact), rejected), has_residual)
    last = op.Where(use_residual, resampled, op.GatherElements(own, accepted, axis=1))
    return graph.verdict(accepted, drafted, last, state, row)


def greedy_draft_sampler(graph: Graph, inputs: dict[str, Value]) -> list[Value]:
    """Return token, status: the draft's most likely token."""
    token, state = graph.most_likely(inputs["logits"])
    return [token, graph.op.Squeeze(state, [1])]


def greedy_verifier(graph: Graph, inputs: dict[str, Value]) -> list[Value]:
    """Return accepted, tokens, status: the draft tokens that are the most likely ones, and the most likely token after them."""
    drafted = inputs["drafted"]
    row = graph.indices(graph.size(drafted, 1))
    own, state = graph.most_likely(inputs["logits"])
    accepted = graph.accept(graph.op.Equal(drafted, own), inputs["drafted_count"], row)
    return graph.verdict(accepted, drafted, own, state, row)


def logprobs(graph: Graph, inputs: dict[str, Value]) -> list[Value]:
    """Return logprobs, top_ids, top_logprobs of the unmodified logits."""
    op = graph.op
    normal = op.LogSoftmax(inputs["logits"], axis=2)
    chosen = op.GatherElements(normal, op.Unsqueeze(op.Max(inputs["tokens"], [0]), [2]), axis=2)
    top_logprobs, top_ids = op.TopK(op.Max(normal, FORBIDDEN), inputs["candidates"], axis=2, _outputs=2)
    return [op.Squeeze(chosen, [2]), top_ids, top_logprobs]


MAKERS: dict[str, Callable[[Graph, dict[str, Value]], list[Value]]] = dict(
    zip(SAMPLERS, (draft_sampler, verifier, greedy_draft_sampler, greedy_verifier, logprobs), strict=True)
)


def sampler(name: str, vocab_rows: int) -> ir.Model:
    """Build one of `contract.SAMPLERS`, for models with `vocab_rows` logits."""
    graph = Graph(vocab_rows)
    inputs, outputs = sampler_tensors(name, vocab_rows)
    values = {
        each.name: graph.builder.input(each.name, ir.DataType.from_numpy(np.dtype(each.dtype)), each.shape) for each in inputs
    }
    for value, each in zip(MAKERS[name](graph, values), outputs, strict=True):
        value.shape = ir.Shape(each.shape)
        graph.builder.add_output(value, each.name)
    return ir.Model(graph.graph, ir_version=10)
