"""Lets a stage begin as its first layer does in the whole graph: with a sum."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import onnx_ir as ir

from outrider.backends.rewriting.matching import source


def begin_with_sums(stages: Iterable[ir.Model]) -> None:
    """Add zero to each sum that a stage takes from the one before.

    A norm of a sum is fused with the sum, and its last bits are not those of a norm alone. In the whole graph, the first norm
    of a stage is one of a sum.
    """
    for before, after in pairwise(stages):
        sums = {each.name for each in before.graph.outputs if _is_sum(each)}
        for value in [each for each in after.graph.inputs if each.name in sums]:
            _add_zero(after.graph, value)


def _add_zero(graph: ir.Graph, value: ir.Value) -> None:
    users = [*value.uses()]
    if [use.node.op_type for use in users] == ["Cast"]:  # it is passed on in another type
        value = users[0].node.outputs[0]
        users = [*value.uses()]
    zero = ir.node("Sub", [value, value])
    total = ir.node("Add", [value, zero.outputs[0]])
    for each in (zero.outputs[0], total.outputs[0]):
        each.type, each.shape = value.type, value.shape
    cast = value.producer()
    if cast is None:
        graph.insert_before(graph[0], [zero, total])
    else:
        graph.insert_after(cast, [zero, total])
    for use in users:
        use.node.replace_input_with(use.idx, total.outputs[0])


def _is_sum(value: ir.Value) -> bool:
    made = source(value, ("Cast",))
    return made is not None and (node := made.producer()) is not None and node.op_type == "Add"
