"""Rewrites an exported step model for OpenVINO: rows of all sequences in one dimension, a paged cache, weights by output.

The result is ONNX with three operators of our own. It does not depend on the machine or on the release of OpenVINO.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from outrider.backends.openvino.names import (
    ATTENDED_ROWS,
    ATTENTION,
    ATTENTION_ROWS,
    BLOCK_WEIGHTS,
    DOMAIN,
    EMBEDDING,
    MAX_CONTEXT_LEN,
    NEW_FEATURES,
    PAGING,
    READ_FEATURES,
)
from outrider.backends.rewriting.attention import CachedAttention
from outrider.backends.rewriting.graphs import apply, input_named, read_batch_off_tokens, save
from outrider.backends.rewriting.joined_products import Products
from outrider.backends.rewriting.layouts import bits_of, by_output, bytes_of
from outrider.backends.rewriting.logits import LastRows
from outrider.backends.rewriting.matching import Op, shape_of, tensor_of
from outrider.backends.rewriting.spare_row import SpareRow
from outrider.engines.contract import (
    BATCH_DIM,
    BOUNDARY,
    FEATURE_POSITIONS,
    INPUT_IDS,
    KEY_POSITIONS,
    LOGITS,
    LOGITS_ROWS,
    PAST_FEATURES,
    PENDING,
    ROWS_DIM,
)

TOKENS_DIM = "tokens"  # rows of all sequences of a pass


class NotExpressible(Exception):
    """A graph has something that OpenVINO's paged attention does not support. The message names it."""


class PagedAttention(CachedAttention):
    """Replaces the nodes that write the cache, slice its window and attend with one operator."""

    WRITES_CACHE = False

    def __init__(self, graph: ir.Graph, refusals: list[str]) -> None:
        """Add the inputs. The reasons for refusals are appended to `refusals`."""
        super().__init__(refusals)
        self._inputs = [_added(graph, name, ir.DataType.INT64, [name]) for name in (ATTENTION_ROWS, ATTENDED_ROWS)]
        for name in PAGING:
            self._inputs.append(_added(graph, name, ir.DataType.INT32, [] if name == MAX_CONTEXT_LEN else [name]))

    def rewrite(self, op: Op, query: Any, key: Any, value: Any, past_key: Any, past_value: Any, attended: Any, **_: Any) -> Any:
        return getattr(op, ATTENTION)(
            query,
            key,
            value,
            past_key,
            past_value,
            *self._inputs,
            heads=query.shape[1],
            kv_heads=key.shape[1],
            key_width=query.shape[3],
            value_width=value.shape[3],
            scale=attended.producer().attributes["scale"].as_float(),
            window=max(self._window or 0, 0),  # 0 is unlimited
            _domain=DOMAIN,
        )


class ChosenRows(LastRows):
    """Limits the product that computes the logits to some rows. The new input `logits_rows` has their indices."""

    SIZE = LOGITS_ROWS

    def rows(self, op: Op, x: Any, wanted: Any) -> Any:
        return op.Gather(x, wanted, axis=0)


def rewrite(model: ir.Model, output: Path) -> dict[str, int]:
    """Rewrite a step model or a stage from `load`, and write it and its weights to `output`.

    The result has these inputs: `input_ids`, int64 [T, 1], the rows of all sequences one after the other; `positions`, int64
    [T], the index at which each row is written; the caches `past_*`, which are written in place; and the inputs in `names`.
    Its outputs are `logits`, float32 [R, 1, V], for the rows [R] in `logits_rows`, and `new_features` if there is a draft head.

    Returns:
        How often each rewrite was applied.

    Raises:
        NotExpressible: the graph cannot be rewritten.
    """
    graph = model.graph
    if any(each.name == PENDING for each in graph.inputs):
        raise NotExpressible("recurrent layers")
    common.InlinePass()(model)  # OpenVINO's reader does not support functions
    model.opset_imports[DOMAIN] = 1
    read_batch_off_tokens(graph)
    for each in [each for each in graph.outputs if (each.name or "").startswith("present_")]:
        graph.outputs.remove(each)
    for each in [*graph.inputs, *graph.outputs]:
        if each.name == INPUT_IDS or str(each.name).startswith(BOUNDARY):
            assert each.shape is not None
            if [str(size) for size in each.shape[:2]] != [BATCH_DIM, ROWS_DIM]:
                raise NotExpressible("stages that pass on other values than those of rows")
            each.shape = ir.Shape([TOKENS_DIM, 1, *each.shape[2:]])
    _features_by_row(graph)
    apply(model, SpareRow)
    refusals: list[str] = []
    counts = apply(model, Products) | apply(model, PagedAttention, graph, refusals) | apply(model, ChosenRows, graph)
    if any(node.op_type == "TensorScatter" for node in graph):
        kind = f"with {refusals[0]}" if refusals else "that is written out, as with soft-capped scores"
        raise NotExpressible(f"attention {kind}")
    if any(each.name == LOGITS for each in graph.outputs) and not counts["logits of some rows"]:
        raise NotExpressible("logits that are not a product of the rows")
    key_positions = input_named(graph, KEY_POSITIONS)
    if list(key_positions.uses()):
        raise NotExpressible("a mask outside of attention")
    graph.inputs.remove(key_positions)
    _by_output(graph)
    _half_embeddings(graph)
    for node in graph:  # rows have moved to another dimension, so many traced shapes are wrong
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = None
    save(model, output)
    return {name: count for name, count in counts.items() if count}


def _features_by_row(graph: ir.Graph) -> None:
    """Make features inputs and outputs by row. The session keeps them, because OpenVINO has no scatter in place."""
    past = next((each for each in graph.inputs if each.name == PAST_FEATURES), None)
    if past is None:
        return
    for node in [use.node for use in past.uses()]:
        if node.op_type == "TensorScatter":
            written = node.inputs[1]
            assert written is not None
            written.name = NEW_FEATURES
            graph.outputs.append(written)
        else:  # a draft head gathers its rows from all features
            (rows,) = [use.node for use in node.outputs[0].uses() if use.node.op_type == "GatherElements"]
            given = _added(graph, READ_FEATURES, past.dtype or ir.DataType.FLOAT, [TOKENS_DIM, 1, shape_of(past)[-1]])
            rows.outputs[0].replace_all_uses_with(given)
    for node in [each for each in graph if any(value is past for value in each.inputs)]:
        for output in node.outputs:
            for use in list(output.uses()):
                graph.remove(use.node)
        graph.remove(node)
    for each in [each for each in graph.inputs if each.name in (PAST_FEATURES, FEATURE_POSITIONS)]:
        graph.inputs.remove(each)


def _added(graph: ir.Graph, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
    graph.inputs.append(value)
    return value


def _replace(graph: ir.Graph, old: ir.Node, new: ir.Node, result: ir.Value) -> None:
    """Insert `new` before `old`, replace `result` with its output, and remove the nodes that are then unused."""
    made = new.outputs[0]
    made.type = ir.TensorType(ir.DataType.FLOAT)
    if result.is_graph_output():  # a stage passes it on
        made.name, made.shape, result.name = result.name, result.shape, None
    graph.insert_before(old, new)
    result.replace_all_uses_with(made, replace_graph_outputs=True)
    for node in (result.producer(), old):
        if node is not None and node.graph is not None:
            graph.remove(node, safe=True)


def _by_output(graph: ir.Graph) -> None:
    """Store quantized weights [K, N] as [N, K / block, block], the layout of the kernels."""
    for node in [each for each in graph if each.op_type == "DequantizeLinear"]:
        quantized, scale, zero = (*node.inputs, None)[:3]
        assert quantized is not None
        assert scale is not None
        inputs = []
        made = [(quantized, _weights_by_output(quantized, scale)), (scale, _scales_by_output(scale))]
        if zero is not None:
            made.append((zero, _weights_by_output(zero, scale)))  # one in each block
        for old, tensor in made:
            name = f"{old.name}.by_output"
            if name not in graph.initializers:  # nodes share what is equal, such as zero points that are all 0
                value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), const_value=tensor)
                value.shape = ir.Shape(list(tensor.shape))  # type: ignore[arg-type]
                graph.register_initializer(value)
            inputs.append(graph.initializers[name])
        _replace(graph, node, ir.node(BLOCK_WEIGHTS, inputs, domain=DOMAIN), node.outputs[0])
        for old, _ in made:
            if not list(old.uses()):
                graph.initializers.pop(str(old.name), None)


def _weights_by_output(quantized: ir.Value, scale: ir.Value) -> ir.LazyTensor:
    """Return weights [K, N] by output. They are computed when they are saved, to save memory."""
    (inputs, outputs), groups = shape_of(quantized), shape_of(scale)[0]
    shape, tensor = [outputs, groups, inputs // groups], tensor_of(quantized)

    def make() -> ir.TensorProtocol:
        values = by_output(tensor)
        if bits_of(tensor) == 8:
            return ir.tensor(values.view(tensor.dtype.numpy()).reshape(shape))
        return ir.PackedTensor(values, tensor.dtype, shape=ir.Shape(shape))

    return ir.LazyTensor(make, dtype=tensor.dtype, shape=ir.Shape(shape))


def _scales_by_output(scale: ir.Value) -> ir.TensorProtocol:
    """Return scales [K / block, N] as [N, K / block, 1].

    They are in fp16 if it represents all of them exactly: in fp32 they would be a ninth of the bytes of a pass.
    """
    tensor = tensor_of(scale)
    values = bytes_of(tensor).view(tensor.dtype.numpy()).reshape(shape_of(scale))
    values = np.ascontiguousarray(values.T)[..., None]
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    return ir.tensor(halves if np.array_equal(halves, values) else values)


def _half_embeddings(graph: ir.Graph) -> None:
    """Mark lookups in fp16 tables whose rows are cast to fp32: otherwise, OpenVINO would keep the table in fp32."""
    for node in [each for each in graph if each.op_type == "Gather"]:
        table, rows = node.inputs[0], node.outputs[0]
        users = [use.node for use in rows.uses()]
        if table is None or table.dtype != ir.DataType.FLOAT16 or ir.convenience.get_const_tensor(table) is None:
            continue
        if len(users) == 1 and users[0].op_type == "Cast" and users[0].attributes.get_int("to") == ir.DataType.FLOAT:
            _replace(graph, node, ir.node(EMBEDDING, list(node.inputs), domain=DOMAIN), users[0].outputs[0])
