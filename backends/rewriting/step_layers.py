"""Finds the order of a step model's layers from what their caches depend on."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

import onnx_ir as ir

CACHE = re.compile(r"(?:past|present)_(?:(?P<attention>key|value)|conv|rows|state)_(?P<index>\d+)")
CacheGroup = tuple[bool, int]  # whether it is attention, and its index among those of its kind


def layers_of(graph: ir.Graph, reads: Mapping[ir.Node, Iterable[ir.Value]]) -> dict[ir.Value, int]:
    """Return the layer that each cache belongs to, from 0 on: its input as well as its output.

    A layer comes after the layers that its caches depend on. Attention beside a recurrence counts as one layer.

    Args:
        graph: the graph of a step model.
        reads: the values that each node depends on; the nodes in their order.
    """
    parts = {value: part for value in (*graph.inputs, *graph.outputs) if (part := _part(value)) is not None}
    known: dict[ir.Value, frozenset[CacheGroup]] = {
        value: frozenset([parts[value]]) for value in graph.inputs if value in parts
    }
    for node, values in reads.items():
        known |= dict.fromkeys(node.outputs, frozenset[CacheGroup]().union(*(known.get(value, ()) for value in values)))
    before: dict[CacheGroup, set[CacheGroup]] = defaultdict(set)
    for value in graph.outputs:
        if value in parts:
            before[parts[value]] |= known[value] - {parts[value]}
    layers = dict[CacheGroup, int]()
    for part in sorted(before, key=lambda each: len(before[each])):
        layers[part] = max((layers[each] + 1 for each in before[part]), default=0)
    return {value: layers[part] for value, part in parts.items()}


def _part(value: ir.Value) -> CacheGroup | None:
    match = CACHE.fullmatch(value.name or "")
    return None if match is None else (match["attention"] is not None, int(match["index"]))
