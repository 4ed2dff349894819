"""Writes the layers that `export/graph/repeated_layers.py` left out of a trace into its graph.

A layer that was traced lies between the operators `Enter` and `Leave`. `Copy` stands for one that is like it. All of them get
the layer's input and what its cache keeps, and return what the layer returns and what its cache keeps afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Container
from operator import attrgetter

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor
from torch import nn

from outrider.export.graph.untouched import TRANSPOSED, UNTOUCHED, Untouched

DOMAIN = "outrider.trace"
ENTER, LEAVE, COPY = "Enter", "Leave", "Copy"
LAYER, TRACED = "layer", "traced"  # attributes: the name of a layer, and of the one that it is like
COUNTED = re.compile(r"\bu\d+\b")  # in sizes, torch's name of a number that a tensor holds


def hide_weights(graph: ir.Graph, module: nn.Module) -> dict[str, ir.TensorProtocol]:
    """Take away the weights of layers that have copies, so that nothing computes with them, and return them by name."""
    prefixes = tuple({_layer(node, TRACED) for node in graph if _is(node, COPY)})
    hidden = {}
    for name, value in graph.initializers.items():
        if value.const_value is None or not name.startswith(prefixes):
            continue
        if _of_module(module, name) is not None:  # the others are constants of the code
            hidden[name], value.const_value = value.const_value, None
    return hidden


def write_layers(graph: ir.Graph, module: nn.Module, hidden: dict[str, ir.TensorProtocol]) -> None:
    """Write the layers that were left out.

    Args:
        graph: the graph of the trace.
        module: the module that was traced.
        hidden: what `hide_weights` returned.
    """
    entered = {_layer(node): node for node in graph if _is(node, ENTER)}
    left = {_layer(node): node for node in graph if _is(node, LEAVE)}
    copies = [node for node in graph if _is(node, COPY)]
    nodes = {name: _nodes(graph, entered[name], left[name], hidden) for name in {_layer(node, TRACED) for node in copies}}
    for copy in copies:
        name = _layer(copy, TRACED)
        values = dict(zip(entered[name].outputs, copy.inputs, strict=True))
        for node in nodes[name]:
            for value in node.inputs:
                if value is not None and value.name in hidden and value.name.startswith(name):
                    own = _layer(copy) + value.name.removeprefix(name)
                    values[value] = graph.initializers.get(own) or _weight(graph, module, own, value, hidden)
            made = ir.Node(
                node.domain,
                node.op_type,
                [None if value is None else values.get(value, value) for value in node.inputs],
                node.attributes.values(),
                overload=node.overload,
                num_outputs=len(node.outputs),
                version=node.version,
            )
            for value, new in zip(node.outputs, made.outputs, strict=True):
                new.type, new.shape = value.type, _of_any_layer(value.shape)
                values[value] = new
            graph.insert_before(copy, made)
        _replace(graph, copy, [values.get(value) or value for value in _inputs(left[name])])
    for node in [*entered.values(), *left.values()]:
        _replace(graph, node, _inputs(node))
    for name, tensor in hidden.items():
        if name in graph.initializers:
            graph.initializers[name].const_value = tensor


def _of_any_layer(shape: ir.Shape | None) -> ir.Shape | None:
    """Return a shape without the sizes that depend on numbers, such as the rows for an expert: they differ between layers."""
    return None if shape is None else ir.Shape([None if COUNTED.search(str(size)) else size for size in shape])


def _nodes(graph: ir.Graph, entered: ir.Node, left: ir.Node, hidden: Container[str]) -> list[ir.Node]:
    """Return the nodes of a layer: what its inputs or weights lead to, and its results depend on."""
    weights = {value for name, value in graph.initializers.items() if name in hidden and name.startswith(_layer(entered))}
    needed, found, own = {*left.inputs}, list[ir.Node](), {*entered.outputs, *weights}
    for node in graph:
        if node is not left and not own.isdisjoint(node.inputs):
            own.update(node.outputs)
            found.append(node)
    kept = list[ir.Node]()
    for node in reversed(found):
        if not needed.isdisjoint(node.outputs):
            needed.update(node.inputs)
            kept.append(node)
    assert not any(attribute.type == ir.AttributeType.GRAPH for node in kept for attribute in node.attributes.values())
    return kept[::-1]


def _weight(graph: ir.Graph, module: nn.Module, name: str, like: ir.Value, hidden: dict[str, ir.TensorProtocol]) -> ir.Value:
    """Add a weight of the module to the graph, in the same way as that of the layer that was traced."""
    tensor = _of_module(module, name)
    assert tensor is not None
    kind = Untouched if hasattr(tensor, UNTOUCHED) else TorchTensor
    _, _, axes = name.partition(TRANSPOSED)
    tensor = tensor.detach().permute([*map(int, axes)]) if axes else tensor.detach()
    assert tuple(tensor.shape) == hidden[str(like.name)].shape
    value = ir.Value(name=name, shape=like.shape, type=like.type, const_value=kind(tensor, name=name))
    graph.register_initializer(value)
    return value


def _of_module(module: nn.Module, name: str) -> torch.Tensor | None:
    try:
        tensor = attrgetter(name.partition(TRANSPOSED)[0])(module)
    except AttributeError:
        return None
    return tensor if isinstance(tensor, torch.Tensor) else None


def _replace(graph: ir.Graph, node: ir.Node, values: list[ir.Value]) -> None:
    for output, value in zip(node.outputs, values, strict=True):
        output.replace_all_uses_with(value, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _inputs(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs if value is not None]


def _is(node: ir.Node, operator: str) -> bool:
    return node.domain == DOMAIN and node.op_type == operator


def _layer(node: ir.Node, attribute: str = LAYER) -> str:
    """Return the prefix of the names of a layer's weights in the graph."""
    return f"model.{node.attributes.get_string(attribute)}."
