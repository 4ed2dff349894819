"""Replaces attention with its cache and window with one `GroupQueryAttention`."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import MatchResult

from outrider.backends.rewriting.attention import CachedAttention
from outrider.backends.rewriting.graphs import input_named
from outrider.backends.rewriting.matching import MICROSOFT, Op
from outrider.engines.contract import INPUT_IDS


class GroupQueryAttention(CachedAttention):
    """Replaces the nodes that write the cache, slice its window and attend with one `GroupQueryAttention` over the same cache.

    If `steady`, it never runs on a single row: a second row of zeros is added, and its output dropped. ONNX Runtime's
    arithmetic for one row differs from that for several, so the last bits of a row would depend on whether it is decoded alone
    or verified with others. With 4-bit or 8-bit weights, activations are rounded to 8 bits, and such a difference sometimes
    changes a token. All other kernels compute a row to the same bits whatever the number of rows.
    """

    def __init__(self, steady: bool, graph: ir.Graph, batch: int, refusals: list[str]) -> None:
        """Prepare for up to `batch` sequences. The reasons for refusals are appended to `refusals`."""
        super().__init__(refusals)
        self._steady = steady
        self._graph = graph
        self._ids = input_named(graph, INPUT_IDS)  # [B, S]
        self._batch = batch

    def check(self, context: Any, query: Any, value: Any, **others: Any) -> MatchResult:  # type: ignore[override]
        matched = super().check(context, query=query, value=value, **others)
        return self.refuse("keys and values of different widths") if matched and query.shape[3] != value.shape[3] else matched

    def rewrite(
        self, op: Op, query: Any, key: Any, value: Any, past_key: Any, past_value: Any, positions: Any, attended: Any, **_: Any
    ) -> Any:
        heads, kv_heads, width = query.shape[1], key.shape[1], query.shape[3]
        scale = attended.producer().attributes["scale"].as_float()
        query_input, key_input, rotary = self._unrotated(query, key)
        flat = self._packed([self._flat(op, each) for each in (query_input, key_input, value)])
        # Taken from the tokens, so that all layers share what is computed from it.
        real = rows = op.Shape(self._ids, start=1, end=2)
        if self._steady:
            rows = op.Max(real, op.Constant(value_ints=[2]))

        def attend(flat: list[Any], caches_of_slot: tuple[Any, Any], last: Any, total: Any) -> Any:
            return op.GroupQueryAttention(
                *flat,
                *caches_of_slot,
                last,
                total,
                *rotary,
                num_heads=heads,
                kv_num_heads=kv_heads,
                scale=scale,
                do_rotary=int(bool(rotary)),
                local_window_size=self._window,
                _domain=MICROSOFT,
                _outputs=3,
            )

        if self._batch == 1:
            if self._steady:
                flat = self._padded(op, flat, op.Constant(value_ints=[0]), op.Sub(rows, real))
            last = op.Cast(op.Sub(op.Add(positions, rows), op.Constant(value_ints=[1])), to=ir.DataType.INT32)
            total = op.Cast(op.Add(op.ReduceMax(positions, keepdims=0), op.Squeeze(rows)), to=ir.DataType.INT32)
            attended, present_key, present_value = attend(flat, (past_key, past_value), last, total)
        else:
            attended, present_key, present_value = self._by_slot(
                op, attend, flat, (past_key, past_value), positions, real, rows
            )
        if self._steady:
            attended = op.Slice(attended, op.Constant(value_ints=[0]), real, op.Constant(value_ints=[1]))
        (attended.shape, attended.dtype) = ir.Shape([query.shape[0], query.shape[2], heads * width]), query.dtype
        return op.Reshape(attended, op.Constant(value_ints=[0, 0, heads, width])), present_key, present_value

    def _unrotated(self, query: Any, key: Any) -> tuple[Any, Any, tuple[Any, ...]]:
        """Return query and key before their rotary embeddings, and the cosines and sines, if the node can rotate them."""
        inputs, caches = [], []
        for each in (query, key):
            node = each.producer()
            if node is not None and node.op_type == "RotaryEmbedding" and node.domain == MICROSOFT:
                caches.append(tuple(node.inputs[2:]))
                each = node.inputs[0]
            inputs.append(each)
        # It only rotates heads whose width is a multiple of 16; others must be rotated before.
        if len(caches) == 2 and caches[0] == caches[1] and query.shape[3] % 16 == 0:
            return inputs[0], inputs[1], caches[0]
        return query, key, ()

    def _by_slot(
        self, op: Op, attend: Any, flat: list[Any], past: tuple[Any, Any], positions: Any, real: Any, rows: Any
    ) -> tuple[Any, Any, Any]:
        """Attend to each sequence with a separate node and cache. Everything else runs over the whole batch.

        `GroupQueryAttention` verifies one sequence at a time. If a pass has fewer sequences than there are nodes, the remaining
        nodes get the fewest rows of zeros that they accept.
        """
        # One sequence of zeros after the real ones, for the nodes without a sequence.
        flat = self._padded(op, flat, op.Constant(value_ints=[1]), op.Sub(rows, real))
        count, numbers = op.Shape(self._ids, start=0, end=1), op.Constant(value_ints=list(range(self._batch)))
        minimum = op.Constant(value_ints=[2 if self._steady else 1])
        lengths = op.Where(op.Less(numbers, count), rows, minimum)
        spare = op.Sub(op.Constant(value_ints=[self._batch]), count)
        begins = op.Pad(positions, op.Concat(op.Constant(value_ints=[0]), spare, axis=0))
        ends = op.Add(begins, lengths)
        zero, one, axes = op.Constant(value_ints=[0]), op.Constant(value_ints=[1]), op.Constant(value_ints=[0, 1])
        attended, present = [], []
        for slot in range(self._batch):
            here, after = op.Constant(value_ints=[slot]), op.Constant(value_ints=[slot + 1])
            place = op.Min(here, count)
            size, end = op.Slice(lengths, here, after), op.Slice(ends, here, after)
            bounds = op.Concat(place, zero, axis=0), op.Concat(op.Add(place, one), size, axis=0)
            parts = [None if each is None else op.Slice(each, *bounds, axes) for each in flat]
            last = op.Cast(op.Sub(end, one), to=ir.DataType.INT32)
            out, *caches = attend(parts, self._caches(slot, past), last, op.Cast(op.Squeeze(end), to=ir.DataType.INT32))
            attended.append(out)
            present.append(caches)
        for slot, caches in enumerate(present[1:], 1):
            for value, before in zip(caches, past, strict=True):
                value.name = f"{before.name.replace('past', 'present')}.{slot}"
                (value.shape, value.dtype) = before.shape, before.dtype
                self._graph.outputs.append(value)
        merged = op.Slice(op.Concat(*attended, axis=1), zero, op.Mul(count, rows), one)
        shape = op.Concat(count, rows, op.Constant(value_ints=[-1]), axis=0)
        return op.Reshape(merged, shape), *present[0]

    def _caches(self, slot: int, past: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return the cache of a slot: the first slot keeps the names, and the others get new inputs."""
        if slot == 0:
            return past
        caches = []
        for first in past:
            value = ir.Value(name=f"{first.name}.{slot}", type=first.type, shape=first.shape)
            self._graph.inputs.append(value)
            caches.append(value)
        return caches[0], caches[1]

    def _padded(self, op: Op, flat: list[Any], sequences: Any, rows: Any) -> list[Any]:
        """Append `sequences` sequences of zeros, and `rows` rows of zeros to each sequence."""
        zero = op.Constant(value_ints=[0])
        pads = op.Concat(op.Constant(value_ints=[0, 0, 0]), sequences, rows, zero, axis=0)
        return [None if each is None else op.Pad(each, pads) for each in flat]

    def _packed(self, flat: list[Any]) -> list[Any]:
        """Return query, key and value; as one packed tensor if they are its parts."""
        split = flat[0].producer()
        if split is None or split.op_type != "Split" or list(split.outputs) != flat:
            return flat
        return [split.inputs[0], None, None]

    def _flat(self, op: Op, value: Any) -> Any:
        """Return [B, H, S, D] as [B, S, H * D]; if it was reshaped from such a tensor, return that tensor."""
        node = value.producer()
        if node is not None and node.op_type == "Transpose" and list(node.attributes["perm"].as_ints()) == [0, 2, 1, 3]:
            split = node.inputs[0].producer()
            if split is not None and split.op_type == "Reshape" and len(split.inputs[0].shape or ()) == 3:
                return split.inputs[0]
            return op.Reshape(node.inputs[0], op.Constant(value_ints=[0, 0, -1]))
        return op.Reshape(op.Transpose(value, perm=[0, 2, 1, 3]), op.Constant(value_ints=[0, 0, -1]))
