"""Replaces the loops over rows in recurrent layers with ONNX Runtime's operator.

Its CPU kernel processes one row after the other, so a row has the same bits whatever the number of rows.
"""

from __future__ import annotations

import onnx_ir as ir

from outrider.backends.rewriting.matching import MICROSOFT
from outrider.engines.contract import DOMAIN, GATED, GATED_DELTA, ROWS

UPDATE_RULES = {GATED + ROWS: "gated", GATED_DELTA + ROWS: "gated_delta"}


def recurrences(model: ir.Model) -> int:
    """Redefine the functions of recurrences with `LinearAttention`, and return how many layers call them."""
    replaced = {name: rule for name, rule in UPDATE_RULES.items() if (DOMAIN, name, "") in model.functions}
    for name, rule in replaced.items():
        before = model.functions[DOMAIN, name, ""]
        inputs = [ir.Value(name=each.name) for each in before.inputs]
        query, key, value, past, decay, *beta = inputs
        node = ir.Node(
            MICROSOFT,
            "LinearAttention",
            [query, key, value, past, decay, *beta],
            [
                ir.RefAttr("q_num_heads", "heads", ir.AttributeType.INT),
                ir.RefAttr("kv_num_heads", "heads", ir.AttributeType.INT),
                ir.AttrString("update_rule", rule),
                ir.AttrFloat32("scale", 1.0),
            ],
            num_outputs=2,
        )
        for output, called in zip(node.outputs, before.outputs, strict=True):
            output.name = called.name
        graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 24, MICROSOFT: 1})
        attributes = list(before.attributes.values())
        model.functions[DOMAIN, name, ""] = ir.Function(DOMAIN, name, "", graph=graph, attributes=attributes)
    rules = {name.removesuffix(ROWS) for name in replaced}
    return sum(node.domain == DOMAIN and node.op_type in rules for node in model.graph)
