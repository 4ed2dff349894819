"""Attention with its cache and window as one `GroupQueryAttention`."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import MatchResult, RewriteRuleClassBase

from outrider.backends.onnxruntime.fusion.matching import MICROSOFT, Op, constant, is_rows, refused, source
from outrider.engines.contract import INPUT_IDS, KEY_POSITIONS


class SpareRow(RewriteRuleClassBase):
    """The attention that an export of 4 or 8 bits computes twice for its last row is computed once again: `CachedAttention`
    sees to it otherwise that no row is alone."""

    def __init__(self) -> None:
        super().__init__("spare rows", remove_nodes=False)  # all layers share the longer mask

    def pattern(
        self, op: Op, query: Any, last: Any, keys: Any, values: Any, mask: Any, last_mask: Any, start: Any, end: Any, axes: Any
    ) -> Any:
        inputs = op.Concat(query, last, axis=2), keys, values, op.Concat(mask, last_mask, axis=2)
        attended = op.Attention(*inputs, _allow_other_attributes=True, _outputs=["attended"])
        return op.Slice(attended, start, end, axes, _allow_other_inputs=True)

    def check(self, context: Any, query: Any, last: Any, mask: Any, last_mask: Any, **_: Any) -> MatchResult:  # type: ignore[override]
        for whole, part in ((query, last), (mask, last_mask)):
            if source(part, ("Slice",)) is not whole:
                return refused("attention of rows and others")
        return MatchResult()

    def rewrite(self, op: Op, query: Any, keys: Any, values: Any, mask: Any, attended: Any, **_: Any) -> Any:
        return op.Attention(query, keys, values, mask, **attended.producer().attributes)


class CachedAttention(RewriteRuleClassBase):
    """Writing the cache, looking at its window, and attending, as one `GroupQueryAttention` over the same cache.

    A `steady` one never sees a single row: it gets a second one of zeros, whose output is dropped. ONNX Runtime attends with
    other arithmetic for one row than for several, so the last bits of a row would depend on whether it is decoded alone or
    verified in company; with weights of 4 or 8 bits, where activations are rounded to 8, they become other tokens now and
    then. All its other kernels there give each row the same bits in any company.
    """

    def __init__(self, steady: bool, graph: ir.Graph, batch: int, refusals: list[str]) -> None:
        """For up to `batch` sequences; what is refused is put down in `refusals`."""
        super().__init__("attention")
        self._steady = steady
        self._graph = graph
        self._ids = next(each for each in graph.inputs if each.name == INPUT_IDS)  # [B, S]
        self._batch = batch
        self._refusals = refusals

    def pattern(
        self,
        op: Op,
        query: Any,
        key: Any,
        value: Any,
        past_key: Any,
        past_value: Any,
        positions: Any,
        mask: Any,
        start: Any,
        end: Any,
        axes: Any,
        value_start: Any,
        value_end: Any,
        value_axes: Any,
    ) -> Any:
        present_key = op.TensorScatter(past_key, key, positions, axis=-2)
        present_value = op.TensorScatter(past_value, value, positions, axis=-2)
        keys = op.Slice(present_key, start, end, axes)
        values = op.Slice(present_value, value_start, value_end, value_axes)
        attended = op.Attention(query, keys, values, mask, _allow_other_attributes=True, _outputs=["attended"])
        return op.Transpose(attended, perm=[0, 2, 1, 3]), present_key, present_value

    def check(  # type: ignore[override]  # the names are the pattern's
        self, context: Any, query: Any, key: Any, value: Any, mask: Any, attended: Any, **_: Any
    ) -> MatchResult:
        if any(each.shape is None or len(each.shape) != 4 for each in (query, key, value)):
            return self._refused("its shapes are not known")
        if query.shape[3] != value.shape[3]:
            return self._refused("its values are of another width than its keys")
        if attended.producer().attributes.keys() - {"scale"}:
            return self._refused("it has more attributes than a scale")
        self._window = sliding_window(mask)
        return self._refused("its mask is not causal") if self._window is None else MatchResult()

    def _refused(self, reason: str) -> MatchResult:
        self._refusals.append(reason)
        return refused(reason)

    def rewrite(
        self, op: Op, query: Any, key: Any, value: Any, past_key: Any, past_value: Any, positions: Any, attended: Any, **_: Any
    ) -> Any:
        heads, kv_heads, width = query.shape[1], key.shape[1], query.shape[3]
        scale = attended.producer().attributes["scale"].as_float()
        inputs, caches = [], []
        for each in (query, key):
            node = each.producer()
            if node is not None and node.op_type == "RotaryEmbedding" and node.domain == MICROSOFT:
                caches.append(tuple(node.inputs[2:]))
                each = node.inputs[0]
            inputs.append(each)
        # It rotates heads of widths that 16 divides; others come rotated.
        rotary = len(caches) == 2 and caches[0] == caches[1] and width % 16 == 0
        flat = self._packed([self._flat(op, each) for each in (*(inputs if rotary else (query, key)), value)])
        real = rows = op.Shape(self._ids, start=1, end=2)  # of the tokens, so that all layers share what comes of it
        if self._steady:
            rows = op.Max(real, op.Constant(value_ints=[2]))

        def attend(flat: list[Any], caches_of_slot: tuple[Any, Any], last: Any, total: Any) -> Any:
            return op.GroupQueryAttention(
                *flat,
                *caches_of_slot,
                last,
                total,
                *(caches[0] if rotary else ()),
                num_heads=heads,
                kv_num_heads=kv_heads,
                scale=scale,
                do_rotary=int(rotary),
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

    def _by_slot(
        self, op: Op, attend: Any, flat: list[Any], past: tuple[Any, Any], positions: Any, real: Any, rows: Any
    ) -> tuple[Any, Any, Any]:
        """Attention of each sequence by a node of its own, over a cache of its own: `GroupQueryAttention` verifies one at a
        time. Everything else stays one run over all of them.

        The pass may be of fewer sequences than there are nodes. Those left over get as few rows of zeros as a node takes.
        """
        # One sequence of zeros behind the real ones, for the nodes that are left over.
        flat = self._padded(op, flat, op.Constant(value_ints=[1]), op.Sub(rows, real))
        count, numbers = op.Shape(self._ids, start=0, end=1), op.Constant(value_ints=list(range(self._batch)))
        fewest = op.Constant(value_ints=[2 if self._steady else 1])
        taken = op.Where(op.Less(numbers, count), rows, fewest)
        left_over = op.Sub(op.Constant(value_ints=[self._batch]), count)
        begins = op.Pad(positions, op.Concat(op.Constant(value_ints=[0]), left_over, axis=0))
        ends = op.Add(begins, taken)
        zero, one, axes = op.Constant(value_ints=[0]), op.Constant(value_ints=[1]), op.Constant(value_ints=[0, 1])
        attended, present = [], []
        for slot in range(self._batch):
            here, after = op.Constant(value_ints=[slot]), op.Constant(value_ints=[slot + 1])
            place = op.Min(here, count)
            size, end = op.Slice(taken, here, after), op.Slice(ends, here, after)
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
        joined = op.Slice(op.Concat(*attended, axis=1), zero, op.Mul(count, rows), one)
        shape = op.Concat(count, rows, op.Constant(value_ints=[-1]), axis=0)
        return op.Reshape(joined, shape), *present[0]

    def _caches(self, slot: int, past: tuple[Any, Any]) -> tuple[Any, Any]:
        """The cache of a slot: that of the first has the name of the whole one, the others are new inputs."""
        if slot == 0:
            return past
        found = []
        for first in past:
            value = ir.Value(name=f"{first.name}.{slot}", type=first.type, shape=first.shape)
            self._graph.inputs.append(value)
            found.append(value)
        return found[0], found[1]

    def _padded(self, op: Op, flat: list[Any], sequences: Any, rows: Any) -> list[Any]:
        """So many sequences, and rows to each, of zeros behind the real ones."""
        zero = op.Constant(value_ints=[0])
        pads = op.Concat(op.Constant(value_ints=[0, 0, 0]), sequences, rows, zero, axis=0)
        return [None if each is None else op.Pad(each, pads) for each in flat]

    def _packed(self, flat: list[Any]) -> list[Any]:
        """Query, key and value, as one tensor where they are the parts of one."""
        split = flat[0].producer()
        if split is None or split.op_type != "Split" or list(split.outputs) != flat:
            return flat
        return [split.inputs[0], None, None]

    def _flat(self, op: Op, value: Any) -> Any:
        """[B, H, S, D] as [B, S, H * D]; what was brought from there is taken from there."""
        node = value.producer()
        if node is not None and node.op_type == "Transpose" and list(node.attributes["perm"].as_ints()) == [0, 2, 1, 3]:
            split = node.inputs[0].producer()
            if split is not None and split.op_type == "Reshape" and len(split.inputs[0].shape or ()) == 3:
                return split.inputs[0]
            return op.Reshape(node.inputs[0], op.Constant(value_ints=[0, 0, -1]))
        return op.Reshape(op.Transpose(value, perm=[0, 2, 1, 3]), op.Constant(value_ints=[0, 0, -1]))


def sliding_window(mask: ir.Value) -> int | None:
    """How many keys up to its own a row sees by a mask: -1 is all, None is that the mask is of another kind.

    Causal is keys <= rows; a sliding window of n adds keys > rows - n.
    """
    node = mask.producer()
    if node is None:
        return None
    if node.op_type == "And":
        known = [(each, constant(each)) for each in node.inputs if each is not None]
        windows = [sliding_window(each) for each, values in known if values is None or not values.all()]
        return None if None in windows else max(windows)  # type: ignore[type-var]
    if node.op_type not in ("LessOrEqual", "Greater"):
        return None
    keys, rows = (source(each, ("Unsqueeze",)) for each in node.inputs)
    if keys is None or keys.name != KEY_POSITIONS or rows is None:
        return None
    if node.op_type == "LessOrEqual":
        return -1 if is_rows(rows) else None
    less = rows.producer()
    if less is None or less.op_type != "Sub":
        return None
    start, by = source(less.inputs[0], ("Unsqueeze",)), constant(less.inputs[1])
    return int(by.item()) if start is not None and is_rows(start) and by is not None and by.size == 1 else None
