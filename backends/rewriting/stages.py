"""Cuts the step graph of a target between its layers, into stages that run one after the other.

A stage is a graph like the whole one, with the caches of its layers only. Its boundary is what later stages need of it and of
earlier ones: usually the residual stream, [B, S, H]. Boundary values are outputs of a stage, and inputs of the next one under
the same name. What depends on the inputs of a step only, such as rotary embeddings and masks, is computed in each stage that
needs it. The logits and the features for a draft head are of the last stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import onnx_ir as ir
from onnx_ir.passes import common

from outrider.backends.rewriting.matching import shape_of
from outrider.backends.rewriting.minimum_cut import Uncuttable, minimum_cut
from outrider.backends.rewriting.step_layers import layers_of
from outrider.engines.contract import BATCH_DIM, BOUNDARY, ROWS_DIM
from outrider.errors import UsageError

HEAVY = 4096  # bytes; what reads larger weights is computed in one stage only
COPY = 4096  # bytes a row that one value more in a boundary may save


def layers(model: ir.Model) -> int:
    """Return the number of a step model's layers. Those that keep nothing in a cache count as parts of the layer before."""
    return _StepGraph(model).layers


def possible_ends(model: ir.Model) -> list[int]:
    """Return after how many layers a stage of a step model may end, ascending; the last is the number of its layers."""
    whole = _StepGraph(model)
    return [*whole.possible_ends(), whole.layers]


def boundary(stage: int, index: int) -> str:
    """Return the name of a value that a stage passes to the next."""
    return f"{BOUNDARY}{stage}.{index}"


def cut(model: ir.Model, ends: Sequence[int]) -> list[ir.Model]:
    """Cut a step model into stages.

    They run the nodes of the whole in its order, so the results have the same bits. One exception: a runtime that computes fp16
    in fp32, as ONNX Runtime does on CPUs, rounds to fp16 at a boundary.

    Args:
        model: the step model as it was exported. The stages refer to its weights, also where several use the same.
        ends: the number of layers up to the end of each stage; the last is `layers(model)`.

    Raises:
        UsageError: these are no ascending numbers of layers, or a later layer reads the cache of an earlier one across a cut.
    """
    whole = _StepGraph(model.clone())
    if [*ends] != sorted({*ends}) or not ends or ends[0] < 1 or ends[-1] != whole.layers:
        raise UsageError(
            f"stages of a target with {whole.layers} layers cannot end after {', '.join(map(str, ends)) or 'none'}",
            f"let them end after ascending numbers of layers, the last after {whole.layers}",
        )
    stages, done = list[ir.Model](), set[ir.Node]()
    before, begin = list[ir.Value](), 0
    for stage, end in enumerate(ends):
        after = whole.crossing(end, done) if end < whole.layers else []
        made, nodes = whole.stage(stage, range(begin, end), before, after)
        stages.append(made)
        done |= nodes
        before, begin = after, end
    return stages


class _SizeRead(NamedTuple):
    """A node that reads only sizes of a cache."""

    node: ir.Node
    place: int  # of the cache among its inputs
    axes: slice


class _StepGraph:
    """The graph of a step model, and what depends on what in it. It is changed where nodes read only sizes."""

    def __init__(self, model: ir.Model):
        self.model, self.graph = model, model.graph
        caches = [value for value in self.graph.inputs if (value.name or "").startswith("past_")]
        self._size_reads = [*_size_reads(model, caches)]
        only_sizes = {(read.node, read.place) for read in self._size_reads}
        self._reads = {node: [*_read(self.graph, node, only_sizes)] for node in self.graph}
        of_caches = layers_of(self.graph, self._reads)
        self.layers = max(of_caches.values()) + 1
        # Features, the logits and what else there is are of the last layer.
        self._layer = {value: of_caches.get(value, self.layers - 1) for value in (*caches, *self.graph.outputs)}
        self._heavy = {*_heavy(self.graph, self._reads)}

    def crossing(self, end: int, done: Iterable[ir.Node] = ()) -> list[ir.Value]:
        """Return the values that pass the cut after the first `end` layers, in order; `done` are nodes of earlier stages.

        Raises:
            UsageError: a later layer reads the cache of an earlier one.
        """
        try:
            return self._crossing(end, done)
        except Uncuttable as error:
            others, layer = ", ".join(map(str, self.possible_ends())), self._layer.get(error.source)
            what = (
                f"{error.source.name}, which is not of its rows" if layer is None else f"the cache of layer {layer} (from 0 on)"
            )
            raise UsageError(
                f"no stage of the target can end after {end} layers: a later layer reads {what}",
                f"let it end after another number of layers: {others}" if others else "build the target without stages",
            ) from None

    def possible_ends(self) -> Iterator[int]:
        """Yield after how many layers there may be a cut."""
        for end in range(1, self.layers):
            try:
                self._crossing(end)
            except Uncuttable:
                continue
            yield end

    def stage(self, number: int, span: range, before: list[ir.Value], after: list[ir.Value]) -> tuple[ir.Model, set[ir.Node]]:
        """Return a stage, and the nodes in it.

        Args:
            number: of the stage.
            span: its layers.
            before: the boundary before it.
            after: the boundary after it.
        """
        outputs = [*self._of(self.graph.outputs, span), *after]
        caches = self._of(self.graph.inputs, span)
        nodes = self._nodes(outputs, before)
        for read in self._size_reads:
            if read.node in nodes:
                read.node.replace_input_with(read.place, self._with_sizes(read, caches))
        used = {value for node in nodes for value in (*node.inputs, *self._reads[node])}
        inputs = [value for value in self.graph.inputs if value in caches or (value in used and value not in self._layer)]
        graph = ir.GraphView(
            [*inputs, *before],
            outputs,
            nodes=[node for node in self.graph if node in nodes],
            initializers=[value for value in self.graph.initializers.values() if value in used],
            opset_imports=self.graph.opset_imports,
            name=self.graph.name,
        ).clone()
        for index, value in enumerate(graph.inputs[len(inputs) :]):
            value.name = boundary(number - 1, index)
        first = len(outputs) - len(after)
        for index, value in enumerate(graph.outputs[first:]):
            if value.is_graph_input():  # only later stages need it
                passed = ir.Node("", "Identity", [value])
                passed.outputs[0].type, passed.outputs[0].shape = value.type, value.shape
                graph.append(passed)
                graph.outputs[first + index] = value = passed.outputs[0]
            value.name = boundary(number, index)
        functions = [each.clone() for each in self.model.functions.values()]
        made = ir.Model(graph, ir_version=self.model.ir_version, functions=functions)
        common.RemoveUnusedFunctionsPass()(made)  # type: ignore[no-untyped-call]
        common.RemoveUnusedOpsetsPass()(made)
        return made, nodes

    def _crossing(self, end: int, done: Iterable[ir.Node] = ()) -> list[ir.Value]:
        caches, later = (self._of(self.graph.inputs, span) for span in (range(end), range(end, self.layers)))
        early, late = (self._of(self.graph.outputs, span) for span in (range(end), range(end, self.layers)))
        single = self._heavy & {*self._nodes(early, []), *done}
        while True:
            sources = [*caches, *(output for node in self._reads if node in single for output in node.outputs)]
            found = minimum_cut(self._reads, sources, later, late, _cost)
            twice = self._heavy & self._nodes([*early, *found], []) & self._nodes(late, found)
            if twice <= single:
                return found
            single |= twice

    def _of(self, values: Iterable[ir.Value], span: range) -> list[ir.Value]:
        return [value for value in values if self._layer.get(value) in span]

    def _nodes(self, outputs: Iterable[ir.Value], given: Iterable[ir.Value]) -> set[ir.Node]:
        """Return the nodes that compute `outputs` from `given` and the inputs of the graph."""
        found, known, waiting = set[ir.Node](), {*given}, [*outputs]
        while waiting:
            value = waiting.pop()
            node = value.producer()
            if node is not None and node not in found and value not in known:
                found.add(node)
                waiting += self._reads[node]
        return found

    def _with_sizes(self, read: _SizeRead, caches: Iterable[ir.Value]) -> ir.Value:
        """Return an input of a stage with these caches that has the sizes which a node reads."""
        wanted = _sizes(read.node.inputs[read.place], read.axes)
        of_steps = (value for value in self.graph.inputs if value not in self._layer)
        return next(value for value in (*of_steps, *caches) if _sizes(value, read.axes) == wanted)


def _size_reads(model: ir.Model, caches: Iterable[ir.Value]) -> Iterator[_SizeRead]:
    for cache in caches:
        for node, index in cache.uses():
            axes = _axes(node) if node.op_type == "Shape" else None
            function = model.functions.get(node.op_identifier())
            if function is not None:
                uses = [use.node for use in function.inputs[index].uses()]
                axes = _axes(uses[0]) if len(uses) == 1 and uses[0].op_type == "Shape" else None
            if axes is not None:
                yield _SizeRead(node, index, axes)


def _axes(shape: ir.Node) -> slice:
    end = shape.attributes.get("end")
    return slice(shape.attributes.get_int("start", 0), None if end is None else end.as_int())


def _sizes(value: ir.Value | None, axes: slice) -> list[str]:
    assert value is not None
    assert value.shape is not None
    return [str(size) for size in value.shape[axes]]


def _read(graph: ir.Graph, node: ir.Node, only_sizes: set[tuple[ir.Node, int]]) -> Iterator[ir.Value]:
    """Yield the values that a node depends on, also inside of its sub-graphs."""
    for index, value in enumerate(node.inputs):
        if value is not None and (node, index) not in only_sizes:
            yield value
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            for inner in attribute.as_graph().all_nodes():
                yield from (value for value in inner.inputs if value is not None and value.graph is graph)


def _heavy(graph: ir.Graph, reads: dict[ir.Node, list[ir.Value]]) -> Iterator[ir.Node]:
    """Yield the nodes that read large weights and something else."""
    sizes = {value: tensor.nbytes for value in graph.initializers.values() if (tensor := value.const_value) is not None}
    for node, values in reads.items():
        largest = max((sizes[value] for value in values if value in sizes), default=0)
        if all(value in sizes for value in values):
            sizes |= dict.fromkeys(node.outputs, largest)
        elif largest > HEAVY:
            yield node


def _cost(value: ir.Value) -> int | None:
    """Return what it costs to pass a value to another stage, in bytes a row; None if it is not of the rows of a step."""
    if value.shape is None or value.dtype is None:
        return None
    varying = sorted(str(size) for size in value.shape if not isinstance(size, int))
    return COPY + int(prod(shape_of(value)) * value.dtype.itemsize) if varying == [BATCH_DIM, ROWS_DIM] else None
