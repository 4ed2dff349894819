"""Cuts the step graph of a target between its layers, into stages that run one after the other.

A stage is a graph like the whole one, with the caches of its layers only. Its boundary is what later stages need of it and of
earlier ones: usually the residual stream, [B, S, H]. Boundary values are outputs of one stage, and inputs of the next under the
same name. What depends on the step's inputs only, such as rotary embeddings and masks, is computed in each stage that needs it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import onnx_ir as ir
from onnx_ir.passes import common

from outrider.backends.rewriting.matching import shape_of
from outrider.backends.rewriting.minimum_cut import Uncuttable, minimum_cut
from outrider.engines.contract import BATCH_DIM, ROWS_DIM
from outrider.errors import UsageError

CACHE = re.compile(r"(past|present)_(key|value|conv|rows|state)_(\d+)")
PAST, PRESENT = "past_", "present_"
HEAVY = 4096  # bytes; nodes that read larger weights run in one stage only
COPY = 4096  # bytes; a boundary of several values costs this much more for each of them


def layers(model: ir.Model) -> int:
    """Return the number of a model's layers with a cache or a recurrent state. Other layers count as parts of the one before."""
    return max(_StepGraph(model).layer_of.values()) + 1


def boundary(stage: int, index: int) -> str:
    """Return the name of a value that a stage passes to the next."""
    return f"boundary.{stage}.{index}"


def cut(model: ir.Model, ends: Sequence[int]) -> list[ir.Model]:
    """Cut a model into stages. They run the nodes of the whole in its order, so their results have the same bits.

    Args:
        model: a step model as it was exported. Its weights are in the stages by reference.
        ends: for each stage, the number of layers in it and in the stages before it. The last is `layers(model)`.

    Raises:
        UsageError: later layers read the cache of an earlier one across a cut.
    """
    whole = _StepGraph(model.clone())
    stages, before, begin = list[ir.Model](), list[ir.Value](), 0
    done = set[ir.Node]()
    for stage, end in enumerate(ends):
        outputs = whole.outputs(begin, end)
        after = whole.crossing(end, done) if end < ends[-1] else [each for each in whole.graph.outputs if not _cache(each)]
        if end < ends[-1]:
            outputs_and_after = [*outputs, *after]
        else:
            outputs_and_after = [each for each in whole.graph.outputs if each in {*outputs, *after}]
        done |= whole.nodes([*outputs, *after], before)
        stages.append(whole.extracted(stage, (begin, end), outputs_and_after, before, after if end < ends[-1] else []))
        before, begin = after, end
    return stages


class _SizeRead(NamedTuple):
    """A node that reads only some sizes of a cache."""

    node: ir.Node
    index: int  # of the cache among the node's inputs
    axes: slice


class _StepGraph:
    """The graph of a step model, and what depends on what in it."""

    def __init__(self, model: ir.Model):
        self.model, self.graph = model, model.graph
        self.size_reads = [*self._size_reads()]
        sizes = {(each.node, each.index) for each in self.size_reads}
        self.reads = {node: [each for each in _reads(self.graph, node, sizes)] for node in self.graph}
        self.layer_of = self._layers()  # by the name of a cache's input or output
        self._heavy = self._heavy_nodes()

    def outputs(self, begin: int, end: int) -> list[ir.Value]:
        """Return the caches that some layers write."""
        return [each for each in self.graph.outputs if begin <= self.layer_of.get(each.name or "", -1) < end]

    def nodes(self, outputs: Iterable[ir.Value], given: Iterable[ir.Value]) -> set[ir.Node]:
        """Return the nodes that compute `outputs` from `given` and the inputs of the graph."""
        found, seen, waiting = set[ir.Node](), {*given}, [*outputs]
        while waiting:
            value = waiting.pop()
            node = value.producer()
            if value in seen or node is None:
                continue
            seen.add(value)
            if node not in found:
                found.add(node)
                waiting += self.reads[node]
        return found

    def crossing(self, end: int, done: set[ir.Node]) -> list[ir.Value]:
        """Return the boundary after the first `end` layers, in order.

        Args:
            end: the number of layers.
            done: the nodes of earlier stages.
        """
        early = self.outputs(0, end)
        late = [each for each in self.graph.outputs if each not in early]
        caches = [each for each in self.graph.inputs if self.layer_of.get(each.name or "", end) < end]
        others = [each for each in self.graph.inputs if self.layer_of.get(each.name or "", -1) >= end]
        twice = (self.nodes(early, []) | done) & self._heavy
        single = set[ir.Node]()
        while twice - single:
            single |= twice
            sources = [*caches, *(output for node in single for output in node.outputs)]
            try:
                cutting = minimum_cut(self.graph, self.reads, sources, others, late, _cost)
            except Uncuttable as error:
                raise self._refusal(end, error) from None
            twice = self.nodes([*early, *cutting], []) & self.nodes(late, cutting) & self._heavy
        return cutting

    def extracted(
        self, stage: int, span: tuple[int, int], outputs: list[ir.Value], before: list[ir.Value], after: list[ir.Value]
    ) -> ir.Model:
        """Return a stage as a model."""
        begin, end = span
        caches = [each for each in self.graph.inputs if begin <= self.layer_of.get(each.name or "", -1) < end]
        nodes = self.nodes(outputs, before)
        others = [each for each in self.graph.inputs if (each.name or "") not in self.layer_of]
        for read in self.size_reads:
            if read.node in nodes:
                read.node.replace_input_with(read.index, _same_sizes(read, [*others, *caches]))
        used = {value for node in nodes for value in node.inputs}
        inputs = [each for each in self.graph.inputs if each in used or each in caches]
        graph = ir.convenience.extract(self.graph, [*inputs, *before], outputs)
        for index, value in enumerate(graph.inputs[len(inputs) :]):
            value.name = boundary(stage - 1, index)
        for index in range(len(after)):
            at = len(outputs) - len(after) + index
            value = graph.outputs[at]
            if value.is_graph_input():  # a later stage needs it
                passed = ir.node("Identity", [value])
                passed.outputs[0].type, passed.outputs[0].shape = value.type, value.shape
                graph.append(passed)
                graph.outputs[at] = value = passed.outputs[0]
            value.name = boundary(stage, index)
        functions = [each.clone() for each in self.model.functions.values()]
        made = ir.Model(graph, ir_version=self.model.ir_version, functions=functions)
        common.RemoveUnusedFunctionsPass()(made)
        common.RemoveUnusedOpsetsPass()(made)
        return made

    def _size_reads(self) -> Iterator[_SizeRead]:
        for node in self.graph:
            for index, value in enumerate(node.inputs):
                if value is not None and value.is_graph_input() and (value.name or "").startswith(PAST):
                    axes = self._axes(node, index)
                    if axes is not None:
                        yield _SizeRead(node, index, axes)

    def _axes(self, node: ir.Node, index: int) -> slice | None:
        """Return the axes of an input whose sizes are all that a node reads of it, or None."""
        if node.op_type == "Shape":
            return slice(node.attributes.get_int("start", 0), node.attributes.get_int("end", None))
        function = self.model.functions.get(node.op_identifier())
        if function is None:
            return None
        uses = {self._axes_of(use.node) for use in function.inputs[index].uses()}
        found = uses.pop() if len(uses) == 1 else None
        return None if found is None else slice(*found)

    def _axes_of(self, node: ir.Node) -> tuple[int, int | None] | None:
        axes = self._axes(node, 0) if node.op_type == "Shape" else None
        return None if axes is None else (axes.start, axes.stop)

    def _layers(self) -> dict[str, int]:
        """Return the layer of each cache, by the names of its input and output.

        A layer follows all whose caches its own depends on. Attention and a recurrence side by side are one layer.
        """
        parts = dict[tuple[str, str], int]()
        for value in self.graph.inputs:
            if part := _cache(value):
                parts.setdefault(part, len(parts))
        masks = {value: 1 << parts[part] for value in self.graph.inputs if (part := _cache(value))}
        for node in self.graph:
            mask = 0
            for value in self.reads[node]:
                mask |= masks.get(value, 0)
            masks |= dict.fromkeys(node.outputs, mask)
        before = [0] * len(parts)
        for value in self.graph.outputs:
            if part := _cache(value):
                before[parts[part]] |= masks[value] & ~(1 << parts[part])
        level = [0] * len(parts)
        for index in sorted(range(len(parts)), key=lambda each: before[each].bit_count()):
            level[index] = max((level[each] + 1 for each in range(len(parts)) if before[index] >> each & 1), default=0)
        return {
            value.name or "": level[parts[part]]
            for value in [*self.graph.inputs, *self.graph.outputs]
            if (part := _cache(value))
        }

    def _heavy_nodes(self) -> set[ir.Node]:
        """Return the nodes that read large weights and something else."""
        size = {value: value.const_value.nbytes for value in self.graph.initializers.values() if value.const_value is not None}
        heavy = set[ir.Node]()
        for node in self.graph:
            weights = [size[value] for value in self.reads[node] if value in size]
            if len(weights) == len(self.reads[node]):
                size |= dict.fromkeys(node.outputs, max(weights, default=0))
            elif max(weights, default=0) > HEAVY:
                heavy.add(node)
        return heavy

    def _refusal(self, end: int, error: Uncuttable) -> UsageError:
        read = self.layer_of.get(error.source.name or "")
        reader = self.layer_of.get(error.sink.name or "")
        what = "a later layer" if reader is None else f"layer {reader}"
        return UsageError(
            f"the target cannot be cut after layer {end - 1}: {what} reads what layer {read} keeps",
            f"cut before layer {read}, or after the last layer that reads it",
        )


def _cache(value: ir.Value) -> tuple[str, str] | None:
    """Return what a cache belongs to: a kind of layer and its index."""
    match = CACHE.fullmatch(value.name or "")
    return match and ("attention" if match[2] in ("key", "value") else "recurrent", match[3])


def _reads(graph: ir.Graph, node: ir.Node, sizes: set[tuple[ir.Node, int]]) -> Iterator[ir.Value]:
    """Yield the values that a node reads, without those of which it reads sizes only."""
    for index, value in enumerate(node.inputs):
        if value is not None and (node, index) not in sizes:
            yield value
    for attribute in node.attributes.values():
        for inner in [attribute.as_graph()] if attribute.type == ir.AttributeType.GRAPH else []:
            for each in ir.traversal.RecursiveGraphIterator(inner):
                yield from (value for value in each.inputs if value is not None and value.graph is graph)


def _cost(value: ir.Value) -> int | None:
    """Return what it costs to pass a value to another stage, in bytes a row; None if it may not be passed."""
    shape, dtype = value.shape, value.dtype
    if shape is None or dtype is None or sorted(str(each) for each in shape if not isinstance(each, int)) != [BATCH_DIM, ROWS_DIM]:
        return None
    size = dtype.itemsize
    for each in shape_of(value):
        size *= each
    return COPY + int(size)


def _same_sizes(read: _SizeRead, inputs: Iterable[ir.Value]) -> ir.Value:
    """Return an input of a stage that has the sizes that a node reads."""
    cache = read.node.inputs[read.index]
    assert cache is not None and cache.shape is not None
    wanted = [str(each) for each in cache.shape[read.axes]]
    return next(each for each in inputs if each.shape is not None and [str(size) for size in each.shape[read.axes]] == wanted)
