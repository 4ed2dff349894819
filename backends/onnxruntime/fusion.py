"""The exported graphs rewritten for ONNX Runtime: what it has faster kernels for becomes one node.

Each rewrite is a class with what it looks for (`pattern`), what it refuses and why (`check`), and what it puts in its place
(`rewrite`); the machinery and the rule for norms are onnxscript's. The fused graph has the inputs and outputs of the plain
one. `GroupQueryAttention` knows itself how much of the cache is filled, so the window no longer matters.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript.rewriter import MatchResult, RewriteRuleClassBase, RewriteRuleSet
from onnxscript.rewriter.ort_fusions.rms_normalization import rms_normalization_ruleset
from onnxscript.rewriter.ort_fusions.skip_normalization import skip_rms_normalization_ruleset

from outrider.engines.contract import INPUT_IDS, KEY_POSITIONS, LOGITS, LOGITS_ROWS, POSITIONS

MICROSOFT = "com.microsoft"
Op = Any  # onnxscript's tape; its nodes are typed as Any


def constant(value: ir.Value | None) -> npt.NDArray[Any] | None:
    """What a value always is, where that is known."""
    if value is None:
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def shape_of(value: ir.Value) -> tuple[int, ...]:
    """The shape of what is always the same."""
    assert value.shape is not None
    return tuple(int(size) for size in value.shape if not isinstance(size, ir.SymbolicDim))


def source(value: ir.Value | None, through: tuple[str, ...]) -> ir.Value | None:
    """Where a value comes from, seen through nodes of these kinds by their first inputs."""
    while value is not None and (node := value.producer()) is not None and node.op_type in through:
        value = node.inputs[0]
    return value


def refused(reason: str) -> MatchResult:
    """A match that is not rewritten, and why."""
    return MatchResult().fail(reason)


class Rotary(RewriteRuleClassBase):
    """x cos + rotate_half(x) sin, of angles position * inverse frequency (Su et al. 2021, eq. 34, halves instead of pairs)."""

    def __init__(self, capacity: int):
        super().__init__("rotary embeddings")
        self._capacity = capacity
        self._caches: dict[int, tuple[ir.Value, ir.Value]] = {}  # by the inverse frequencies' id

    def pattern(self, op: Op, x: Any, cos: Any, sin: Any, start: Any, half: Any, middle: Any, end: Any) -> Any:
        rotated = op.Concat(op.Neg(op.Slice(x, middle, end, [3], [1])), op.Slice(x, start, half, [3], [1]), axis=-1)
        return op.Add(op.Mul(x, cos), op.Mul(rotated, sin))

    def check(  # type: ignore[override]  # the names are the pattern's
        self, context: Any, x: Any, cos: Any, sin: Any, start: Any, half: Any, middle: Any, end: Any, **_: Any
    ) -> MatchResult:
        width = x.shape[3] if x.shape is not None and len(x.shape) == 4 else None
        cuts = [constant(value) for value in (start, half, middle, end)]
        if not isinstance(width, int) or any(cut is None for cut in cuts):
            return refused("rotary embeddings of a width that is not fixed")
        first, second, third, last = (int(cut.item()) for cut in cuts if cut is not None)
        if (first, second, third) != (0, width // 2, width // 2) or last < width:
            return refused("rotary embeddings that are not in halves")
        self._angles = angles(cos, "Cos"), angles(sin, "Sin")
        if self._angles[0] is None or self._angles[0] != self._angles[1] or self._angles[0].frequencies.size != width // 2:
            return refused("rotary angles that are not position * frequency")
        return MatchResult()

    def rewrite(self, op: Op, x: Any, **_: Any) -> Any:
        found = self._angles[0]
        assert found is not None
        if id(found.owner) not in self._caches:
            # In fp32, as the checkpoint's own code: at far positions the rounding of the angle is more than that of its cosine.
            table = np.arange(self._capacity, dtype=np.float32)[:, None] * found.frequencies.astype(np.float32)
            made = []
            for name, values in (("cos", np.cos(table)), ("sin", np.sin(table))):
                array = (found.factor * values).astype(ir.DataType.numpy(x.dtype))
                made.append(op.initializer(ir.tensor(array), name=f"{name}_cache_{len(self._caches)}"))
            self._caches[id(found.owner)] = made[0], made[1]
        return op.RotaryEmbedding(x, found.rows, *self._caches[id(found.owner)], _domain=MICROSOFT)


@dataclass(frozen=True)
class Angles:
    """Angles rows * frequencies, whose cosine or sine is multiplied by `factor`."""

    rows: ir.Value  # int64 [B, S]
    owner: ir.Value
    factor: float

    @property
    def frequencies(self) -> npt.NDArray[Any]:
        values = constant(self.owner)
        assert values is not None
        return values.reshape(-1)


def angles(value: ir.Value, function: str) -> Angles | None:
    """What a value is the cosine or sine of, where that is what a rotary embedding has."""
    factor = 1.0
    node = value.producer()
    while node is not None and node.op_type in ("Unsqueeze", "Cast", "Mul"):
        if node.op_type == "Mul":
            by = constant(node.inputs[1])
            if by is None or by.size != 1:
                return None
            factor *= float(by.item())
        inner = node.inputs[0]
        node = None if inner is None else inner.producer()
    if node is None or node.op_type != function:
        return None
    doubled = node.inputs[0].producer() if node.inputs[0] is not None else None
    if doubled is None or doubled.op_type != "Concat" or len(doubled.inputs) != 2 or doubled.inputs[0] is not doubled.inputs[1]:
        return None
    product = source(doubled.inputs[0], ("Transpose",))
    node = product.producer() if product is not None else None
    if node is None or node.op_type not in ("Mul", "MatMul"):
        return None
    for owner, other in (node.inputs, reversed(node.inputs)):
        rows = source(other, ("Cast", "Unsqueeze"))
        if owner is not None and constant(owner) is not None and rows is not None and is_rows(rows):
            return Angles(rows, owner, factor)
    return None


def is_rows(value: ir.Value) -> bool:
    """Whether a value is `positions` + 0..S-1, [B, S]."""
    node = value.producer()
    if node is None or node.op_type != "Add":
        return False
    first, second = node.inputs
    start = source(first, ("Unsqueeze",))
    counting = second.producer() if second is not None else None
    return start is not None and start.name == POSITIONS and counting is not None and counting.op_type == "Range"


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


@dataclass(frozen=True)
class Product:
    """A product with dequantized weights [K, N], and what is added to it."""

    quantized: ir.Value
    scale: ir.Value
    block: int
    bias: npt.NDArray[Any] | None
    output: ir.Value

    @classmethod
    def of(cls, node: ir.Node) -> Product | None:
        """What a node is, where it is one."""
        weight = node.inputs[1].producer() if node.op_type == "MatMul" and node.inputs[1] is not None else None
        if weight is None or weight.op_type != "DequantizeLinear" or len(weight.inputs) != 2:
            return None
        quantized, scale = weight.inputs
        block = weight.attributes.get_int("block_size", 0)
        if quantized is None or scale is None or weight.attributes.get_int("axis", 1) != 0 or not block:
            return None
        if any(ir.convenience.get_const_tensor(each) is None for each in (quantized, scale)):
            return None
        (output,), bias = node.outputs, None
        uses = list(output.uses())
        if len(uses) == 1 and (add := uses[0].node).op_type == "Add":
            added = [constant(each) for each in add.inputs if each is not output]
            bias = next((each for each in added if each is not None and each.shape == shape_of(quantized)[1:]), None)
            output = output if bias is None else add.outputs[0]
        if not output.uses():
            return None  # joined already
        return cls(quantized, scale, block, bias, output)


class Products(RewriteRuleClassBase):
    """Products of one input with different quantized weights (those of query, key and value; those of gate and up) as one
    product with all of them: its input is rounded once, and its threads start once."""

    def __init__(self) -> None:
        super().__init__("joined products")

    def pattern(self, op: Op, x: Any, quantized: Any, scale: Any) -> Any:
        return op.MatMul(x, op.DequantizeLinear(quantized, scale, _allow_other_attributes=True), _outputs=["product"])

    def check(self, context: Any, x: Any, product: Any, **_: Any) -> MatchResult:  # type: ignore[override]
        first = Product.of(product.producer())
        if first is None:
            return refused("a product with weights of another layout")
        found = [Product.of(use.node) for use in x.uses() if use.idx == 0]
        same = [each for each in found if each is not None and self._kind(each) == self._kind(first)]
        if len(same) < 2:
            return refused("a product whose input no other one has")
        self._parts = same
        return MatchResult()

    def _kind(self, part: Product) -> tuple[Any, ...]:
        return part.block, part.quantized.dtype, shape_of(part.quantized)[0], part.scale.dtype

    def rewrite(self, op: Op, product: Any, x: Any, **_: Any) -> Any:
        parts, name = self._parts, self._parts[0].quantized.name
        weight = op.DequantizeLinear(
            op.initializer(_joined([part.quantized for part in parts]), name=f"{name}.joined"),
            op.initializer(_joined([part.scale for part in parts]), name=f"{name}.joined.scale"),
            axis=0,
            block_size=parts[0].block,
        )
        joined = op.MatMul(x, weight)
        sizes = [shape_of(part.quantized)[1] for part in parts]
        if any(part.bias is not None for part in parts):
            kind = next(part.bias.dtype for part in parts if part.bias is not None)
            biases = [np.zeros(n, kind) if part.bias is None else part.bias for part, n in zip(parts, sizes, strict=True)]
            joined = op.Add(joined, op.initializer(ir.tensor(np.concatenate(biases)), name=f"{name}.joined.bias"))
        split = op.Split(joined, op.Constant(value_ints=sizes), axis=-1, _outputs=len(parts))
        replacement = split[0]
        for part, value in zip(parts, split, strict=True):
            (value.shape, value.dtype) = (part.output.shape, part.output.dtype)
            if part.output is product:
                replacement = value
            else:
                part.output.replace_all_uses_with(value)
        return replacement


def _joined(weights: list[ir.Value]) -> ir.LazyTensor:
    """Constant matrices side by side; made when they are saved, and not kept."""
    tensors = [tensor for each in weights if (tensor := ir.convenience.get_const_tensor(each)) is not None]
    rows, columns = shape_of(weights[0])[0], sum(shape_of(each)[1] for each in weights)

    def make() -> ir.TensorProtocol:
        return ir.tensor(np.concatenate([each.numpy() for each in tensors], axis=1), dtype=tensors[0].dtype)

    return ir.LazyTensor(make, dtype=tensors[0].dtype, shape=ir.Shape([rows, columns]))


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


class Unsplit(RewriteRuleClassBase):
    """Heads that are split and joined again."""

    def __init__(self) -> None:
        super().__init__("heads joined")

    def pattern(self, op: Op, x: Any, split: Any, whole: Any) -> Any:
        return op.Reshape(op.Reshape(x, split), whole, _outputs=["joined"])

    def check(self, context: Any, x: Any, joined: Any, **_: Any) -> MatchResult:  # type: ignore[override]
        shapes = [each.shape for each in (x, joined)]
        if any(shape is None or len(shape) != 3 or not isinstance(shape[2], int) for shape in shapes):
            return refused("reshaped to what is not known")
        return MatchResult() if shapes[0][2] == shapes[1][2] else refused("reshaped to another width")

    def rewrite(self, op: Op, x: Any, **_: Any) -> Any:
        return op.Identity(x)


class LastRows(RewriteRuleClassBase):
    """The product that gives the logits, of the last rows alone, as many as the new input `logits_rows` says: a prompt's need
    none."""

    # What stands between that product and the logits, and gives each row what it would get alone.
    ROW_BY_ROW = ("Add", "Cast", "Concat", "Div", "Gather", "Identity", "Mul", "Tanh")

    def __init__(self, graph: ir.Graph) -> None:
        super().__init__("logits of some rows")
        self._graph = graph

    def pattern(self, op: Op, x: Any, weight: Any) -> Any:
        return op.MatMul(x, weight, _outputs=["product"])

    def check(self, context: Any, x: Any, product: Any, **_: Any) -> MatchResult:  # type: ignore[override]
        if any(each.name == LOGITS_ROWS for each in self._graph.inputs):
            return refused("done already")
        value, rank = product, len(x.shape or ())
        while not value.is_graph_output():
            users = {use.node for use in value.uses()}
            # A short head reads its product twice, the second time for a column of one value.
            kinds = {node.op_type for node in users} - {"Slice", "Shape", "Expand", "ConstantOfShape"}
            if len(kinds) != 1 or not kinds <= set(self.ROW_BY_ROW):
                return refused("a product that is not the last")
            value = next(node for node in users if node.op_type in kinds).outputs[0]
        return MatchResult() if value.name == LOGITS and rank == 3 else refused("a product of other than [B, S, K]")

    def rewrite(self, op: Op, x: Any, weight: Any, **_: Any) -> Any:
        count = ir.Value(name=LOGITS_ROWS, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([1]))
        self._graph.inputs.append(count)
        end = op.Shape(x, start=1, end=2)
        return op.MatMul(op.Slice(x, op.Sub(end, count), end, op.Constant(value_ints=[1])), weight)


def fuse(path: Path, output: Path, capacity: int, steady: bool, batch: int) -> tuple[dict[str, int], list[str]]:
    """Write the graph at `path`, fused for caches of `capacity` positions and a spare one, as `output`, its weights beside it.

    For more than one sequence, `past_*` and `present_*` are of the first; those of sequence i of the pass are `past_*.i` and
    `present_*.i`.

    A `steady` one gives a row the same bits in any company, where it was exported to do so; see `CachedAttention`.

    Returns:
        how often each rewrite was made; and, where attention of a layer stays as exported, what was refused and why.
    """
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    model = ir.load(path)
    common.ClearMetadataAndDocStringPass()(model)  # which rewriting joins, twice as long with each layer
    model.opset_imports[MICROSOFT] = 1
    done = {
        "norms": rms_normalization_ruleset.apply_to_model(model),
        "norms of sums": skip_rms_normalization_ruleset.apply_to_model(model),
    }
    ids = next(each for each in model.graph.inputs if each.name == INPUT_IDS)
    caches = [each.name for each in model.graph.inputs if (each.name or "").startswith("past_")]
    for node in model.graph:  # the batch is read off the tokens: a slot's cache has one sequence, whatever the pass has
        sizes, of = [node.attributes.get_int(name, 0) for name in ("start", "end")], node.inputs[0] if node.inputs else None
        if node.op_type == "Shape" and sizes == [0, 1] and of is not None and (of.name or "").startswith("past_"):
            node.replace_input_with(0, ids)
    refusals: list[str] = []
    spared = RewriteRuleSet([SpareRow.rule()]).apply_to_model(model) > 0  # type: ignore[no-untyped-call]
    rules: list[Any] = [
        Products.rule(),  # type: ignore[no-untyped-call]
        Rotary.rule(capacity + 1),  # type: ignore[no-untyped-call]
        CachedAttention.rule(steady and spared, model.graph, batch, refusals),  # type: ignore[no-untyped-call]
        Unsplit.rule(),  # type: ignore[no-untyped-call]
        LastRows.rule(model.graph),  # type: ignore[no-untyped-call]
    ]
    for rewrite in rules:  # in this order: attention takes joined products and rotary embeddings in
        done[rewrite.name] = RewriteRuleSet([rewrite]).apply_to_model(model)
        common.RemoveUnusedNodesPass()(model)
    common.CommonSubexpressionEliminationPass()(model)
    ir.save(model, output, external_data=output.name + ".data", size_threshold_bytes=1024)
    layers = len(caches) // 2
    missed = layers - done["attention"]
    said = dict.fromkeys(refusals) or ["it is written out"]
    why = [f"attention of {missed} of {layers} layers", *said] if missed else []
    return {name: count for name, count in done.items() if count}, why
