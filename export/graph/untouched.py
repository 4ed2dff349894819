"""Stand-ins in a graph for weights that are read after the trace."""

from __future__ import annotations

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor
from torch import nn

UNTOUCHED = "untouched"  # an attribute of parameters without numbers
TRANSPOSED = ".transposed_"


class Untouched(TorchTensor):
    """A tensor that stands for a weight that is read after the trace, so that nothing may compute with its numbers."""


def mark_untouched(graph: ir.Graph, module: nn.Module) -> None:
    """Give the parameters with the attribute `UNTOUCHED` another type in the graph: torch makes new ones at the same place."""
    addresses = {each.data_ptr() for each in module.parameters() if hasattr(each, UNTOUCHED)}
    for value in graph.initializers.values():
        raw = getattr(value.const_value, "raw", None)
        if isinstance(raw, torch.Tensor) and raw.data_ptr() in addresses:
            value.const_value = Untouched(raw, name=value.name)


def lift_transposes(graph: ir.Graph) -> None:
    """Replace transposed weights that are read later by other such weights, whose names end with `TRANSPOSED` and the axes.

    Other transposed weights are constants, which `simplify` folds.
    """
    for node in list(graph):
        value = node.inputs[0] if node.op_type == "Transpose" else None
        if value is None or not isinstance(value.const_value, Untouched) or len(value.uses()) > 1:
            continue
        axes = node.attributes.get_ints("perm")
        name = f"{value.name}{TRANSPOSED}{''.join(map(str, axes))}"
        tensor = Untouched(value.const_value.raw.permute(*axes), name=name)
        lifted = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        graph.register_initializer(lifted)
        node.outputs[0].replace_all_uses_with(lifted)
        graph.remove(node, safe=True)
        del graph.initializers[str(value.name)]
