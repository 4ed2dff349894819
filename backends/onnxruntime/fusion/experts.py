"""Replaces quantized experts with ONNX Runtime's operator, which does not write dequantized weights to memory."""

from __future__ import annotations

import onnx.parser
import onnx_ir as ir

from outrider.backends.rewriting.matching import MICROSOFT
from outrider.engines.contract import DOMAIN, EXPERTS

# Its router picks the k experts that have a 1.
KERNEL = """
<domain: "{domain}", opset_import: ["" : 24, "{microsoft}" : 1]>
{name} <alpha, beta, limit, experts, block> (rows, chosen, weights, gate_up, gate_up_scale, gate_up_bias, down,
  down_scale, down_bias) => (output) {{
  count = Shape <start: int = 0, end: int = 1> (rows)
  all = Shape <start: int = 0, end: int = 1> (gate_up)
  by_expert = Concat <axis: int = 0> (count, all)
  none = Constant <value_float: float = 0.0> ()
  zeros = Expand (none, by_expert)
  one = Constant <value_float: float = 1.0> ()
  pairs = Shape (chosen)
  ones = Expand (one, pairs)
  router = ScatterElements <axis: int = 1> (zeros, chosen, ones)
  factors = ScatterElements <axis: int = 1> (zeros, chosen, weights)
  {product}
}}
"""
NODE = """{y} = {microsoft}.QMoE <k: int = @experts, expert_weight_bits: int = {bits}, block_size: int = @block,
    activation_type: string = "swiglu", swiglu_fusion: int = 1, swiglu_limit: float = @limit, activation_alpha: float = @alpha,
    activation_beta: float = @beta>
    ({x}, {router}, gate_up, gate_up_scale, gate_up_bias, down, down_scale, down_bias, , , , , , , {factors})"""
# Its kernel for one row computes slightly different results than its kernel for several.
ROW_BY_ROW = """n = Squeeze (count)
  more = Constant <value = bool {{1}}> ()
  first = Constant <value_ints: ints = [0]> ()
  by_row = Loop (n, more) <body = row (int64 t, bool on) => (bool go_on, float[1, H] y) {{
    go_on = Identity (on)
    at = Unsqueeze (t, first)
    x = Gather <axis: int = 0> (rows, at)
    its_router = Gather <axis: int = 0> (router, at)
    its_factors = Gather <axis: int = 0> (factors, at)
    {node}
  }}>
  shape = Shape (rows)
  output = Reshape <allowzero: int = 1> (by_row, shape)"""


def experts(model: ir.Model, steady: bool) -> int:
    """Redefine the functions of experts with `QMoE`, and return how many layers call them.

    Args:
        steady: whether a row must have the same bits whatever the number of rows.
    """
    names = {name: bits for bits, name in EXPERTS.items() if (DOMAIN, name, "") in model.functions}
    calls = [node for node in model.graph if node.domain == DOMAIN and node.op_type in names]
    for name, bits in names.items():
        shared = {"microsoft": MICROSOFT, "bits": bits}
        if steady:
            node = NODE.format(**shared, x="x", router="its_router", factors="its_factors", y="y")
            product = ROW_BY_ROW.format(node=node)
        else:
            product = NODE.format(**shared, x="rows", router="router", factors="factors", y="output")
        text = KERNEL.format(domain=DOMAIN, microsoft=MICROSOFT, name=name, product=product)
        function = ir.serde.deserialize_function(onnx.parser.parse_function(text))
        model.functions[function.identifier()] = function
    return len(calls)
