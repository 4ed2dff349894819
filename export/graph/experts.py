"""Experts of a mixture with int4 or int8 weights, as an ONNX function that uses only standard operators.

Only the weights of the chosen experts are read and dequantized. A backend with its own kernel replaces the definition, as for
recurrences.
"""

from __future__ import annotations

from typing import NamedTuple

import onnx.parser
import onnx_ir as ir
import torch
from torch import nn
from torch.onnx.ops import symbolic

from outrider.engines.contract import DOMAIN, EXPERTS
from outrider.export.graph.recurrence_functions import OPSETS

NO_LIMIT = float(torch.finfo(torch.float32).max)


class Gate(NamedTuple):
    """How experts combine the two halves of their first product: min(gate, limit) sigmoid(alpha min(gate, limit)) (u + beta).

    u is the other half, clipped to -limit..limit.
    """

    alpha: float
    beta: float
    limit: float

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate = gate.clamp(max=self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up.clamp(-self.limit, self.limit) + self.beta)


def gate_of(experts: nn.Module) -> Gate | None:
    """Return the gate of a module of experts, or None for other kinds of gates.

    Model families define their gates in code, so this function compares results.
    """
    if not getattr(experts, "has_gate", False) or getattr(experts, "has_post_expert_norm", True):
        return None
    alpha, limit = getattr(experts, "alpha", None), getattr(experts, "limit", None)
    gates = [Gate(1.0, 0.0, NO_LIMIT)]
    if isinstance(alpha, int | float) and isinstance(limit, int | float):
        gates.append(Gate(float(alpha), 1.0, float(limit)))
    width = 64
    sample = 8 * torch.randn(8, 2 * width, generator=torch.Generator().manual_seed(0))
    halves = (sample[:, :width], sample[:, width:]) if experts.is_concatenated else (sample[:, ::2], sample[:, 1::2])
    wanted = experts._apply_gate(sample)  # type: ignore[operator]  # from transformers' decorator
    return next((gate for gate in gates if torch.allclose(gate(*halves), wanted, rtol=1e-5, atol=1e-6)), None)


class Stack(NamedTuple):
    """A projection of all experts: y = x W^T + bias."""

    packed: torch.Tensor  # uint8 [E, N, K], or two weights to a byte [E, N, K / 2], each 8 or 128 more than its integer
    scale: torch.Tensor  # float32 [E, N, K / block]
    bias: torch.Tensor  # float32 [E, N]


class BlockExperts(nn.Module):
    """Experts whose weights have one scale per output for each block of inputs. The outputs of the two halves alternate."""

    def __init__(self, gate_up: Stack, down: Stack, gate: Gate, bits: int, exact: bool):
        """Make them; `exact` tells whether the weights are the checkpoint's."""
        super().__init__()
        self.gate, self.bits, self.exact = gate, bits, exact
        for name, stack in (("gate_up", gate_up), ("down", down)):
            for part, tensor in stack._asdict().items():
                self.register_buffer(f"{name}_{part}", tensor)

    @property
    def stacks(self) -> tuple[Stack, Stack]:
        """The first and the second projection."""
        parts = [[getattr(self, f"{name}_{part}") for part in Stack._fields] for name in ("gate_up", "down")]
        return Stack(*parts[0]), Stack(*parts[1])

    @property
    def weights(self) -> int:
        """The number of rounded weights."""
        return sum(stack.packed.numel() for stack in self.stacks) * 8 // self.bits

    def forward(self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return float32 [S, H], the sum of the chosen experts' outputs.

        Args:
            rows: float32 [S, H].
            chosen: int64 [S, k], the ids of the experts.
            weights: float32 [S, k], the weights of the experts' outputs.
        """
        gate_up, down = self.stacks
        if torch.compiler.is_exporting():
            block = gate_up.packed.shape[2] * 8 // self.bits // gate_up.scale.shape[2]
            attributes = {**self.gate._asdict(), "experts": chosen.shape[1], "block": block}
            inputs = (rows, chosen, weights, *gate_up, *down)
            output: torch.Tensor = symbolic(
                f"{DOMAIN}::{EXPERTS[self.bits]}", inputs, attributes, dtype=torch.float32, shape=rows.shape, version=1
            )
            return output
        first = torch.einsum("sh,sknh->skn", rows, self._weights(gate_up, chosen)) + gate_up.bias[chosen]
        second = torch.einsum("skn,skhn->skh", self.gate(first[..., ::2], first[..., 1::2]), self._weights(down, chosen))
        added: torch.Tensor = ((second + down.bias[chosen]) * weights[..., None]).sum(1)
        return added

    def _weights(self, stack: Stack, chosen: torch.Tensor) -> torch.Tensor:
        """Return float32 [S, k, N, K]."""
        packed, scale = stack.packed[chosen], stack.scale[chosen]
        if self.bits == 4:
            packed = torch.stack((packed & 15, packed >> 4), -1)
        integers = packed.reshape(*scale.shape, -1).float() - 2 ** (self.bits - 1)
        weights: torch.Tensor = (integers * scale[..., None]).flatten(3)
        return weights


def packed(quantized: torch.Tensor, bits: int) -> torch.Tensor:
    """Return int8 [..., K] as the bytes of a `Stack`."""
    shifted = (quantized.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)
    pairs: torch.Tensor = shifted[..., ::2] | shifted[..., 1::2] << 4
    return shifted if bits == 8 else pairs


UNPACKED = {  # with floats, because not every backend shifts bytes as ONNX does
    8: "numbers = Identity (floats)",
    4: """sixteen = Constant <value_float: float = 16.0> ()
  quotients = Div (floats, sixteen)
  high = Floor (quotients)
  times_sixteen = Mul (high, sixteen)
  low = Sub (floats, times_sixteen)
  pair = Constant <value_ints: ints = [3]> ()
  low_of_pair = Unsqueeze (low, pair)
  high_of_pair = Unsqueeze (high, pair)
  numbers = Concat <axis: int = 3> (low_of_pair, high_of_pair)""",
}
LINEAR = """
<domain: "{domain}", {opsets}>
{name}Linear (x, packed, scale, bias, each) => (y) {{
  bytes = Gather <axis: int = 0> (packed, each)
  floats = Cast <to: int = 1> (bytes)
  {unpacked}
  scales = Gather <axis: int = 0> (scale, each)
  zero_point = Constant <value_float: float = {zero_point}> ()
  integers = Sub (numbers, zero_point)
  rest = Constant <value_ints: ints = [-1]> ()
  blocks = Shape (scales)
  by_block = Concat <axis: int = 0> (blocks, rest)
  in_blocks = Reshape (integers, by_block)
  of_block = Unsqueeze (scales, rest)
  scaled = Mul (in_blocks, of_block)
  outputs = Shape <start: int = 0, end: int = 2> (scales)
  by_output = Concat <axis: int = 0> (outputs, rest)
  in_rows = Reshape (scaled, by_output)
  weight = Transpose <perm = [0, 2, 1]> (in_rows)
  product = MatMul (x, weight)
  biases = Gather <axis: int = 0> (bias, each)
  row = Constant <value_ints: ints = [1]> ()
  of_row = Unsqueeze (biases, row)
  y = Add (product, of_row)
}}
"""
FUNCTION = """
<domain: "{domain}", {opsets}>
{name} <alpha, beta, limit, experts, block> (rows, chosen, weights, gate_up, gate_up_scale, gate_up_bias, down,
  down_scale, down_bias) => (output) {{
  rest = Constant <value_ints: ints = [-1]> ()
  one = Constant <value_ints: ints = [1]> ()
  two = Constant <value_ints: ints = [2]> ()
  each = Reshape (chosen, rest)
  pairs = Shape (chosen)
  width = Shape <start: int = 1> (rows)
  all = Concat <axis: int = 0> (pairs, width)
  apart = Unsqueeze (rows, one)
  repeated = Expand (apart, all)
  as_rows = Concat <axis: int = 0> (rest, one, width)
  x = Reshape (repeated, as_rows)
  first = {domain}.{name}Linear (x, gate_up, gate_up_scale, gate_up_bias, each)
  same = Shape <start: int = 0, end: int = 2> (first)
  alternating = Concat <axis: int = 0> (same, rest, two)
  by_two = Reshape (first, alternating)
  zero = Constant <value_int: int = 0> ()
  one_s = Constant <value_int: int = 1> ()
  gate = Gather <axis: int = 3> (by_two, zero)
  up = Gather <axis: int = 3> (by_two, one_s)
  most = Constant <value_float: float = @limit> ()
  least = Neg (most)
  limited = Min (gate, most)
  alpha_c = Constant <value_float: float = @alpha> ()
  steeper = Mul (limited, alpha_c)
  share = Sigmoid (steeper)
  gated = Mul (limited, share)
  clipped = Clip (up, least, most)
  beta_c = Constant <value_float: float = @beta> ()
  shifted = Add (clipped, beta_c)
  hidden = Mul (gated, shifted)
  second = {domain}.{name}Linear (hidden, down, down_scale, down_bias, each)
  by_row = Reshape (second, all)
  weight = Unsqueeze (weights, two)
  weighted = Mul (by_row, weight)
  output = ReduceSum <keepdims: int = 0> (weighted, one)
}}
"""


def functions(name: str) -> list[ir.Function]:
    """Return the definitions of the experts' function with this name and of the functions that it calls."""
    (bits,) = (bits for bits, each in EXPERTS.items() if each == name)
    names = {"domain": DOMAIN, "opsets": OPSETS, "name": name}
    texts = [
        LINEAR.format(**names, unpacked=UNPACKED[bits], zero_point=float(2 ** (bits - 1))),
        FUNCTION.format(**names),
    ]
    return [ir.serde.deserialize_function(onnx.parser.parse_function(text)) for text in texts]
