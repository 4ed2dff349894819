"""The quantized modules that `make_fixtures.py` wrote, and what else checkpoints have beside such modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.export.checkpoints.packed import packing_of, unpacked
from outrider.export.checkpoints.packed_weight import PackedWeight

ARRAYS = dict(np.load(Path(__file__).with_name("fixtures.npz")))
CASES = sorted({name.split("/")[0] for name in ARRAYS})
# Servers round their activations and caches by these.
UNUSED = (
    *("self_attn.k_scale", "self_attn.v_scale", "self_attn.q_scale", "self_attn.k_zero_point", "self_attn.prob_output_scale"),
    *("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale", "self_attn.k_proj.output_scale", "self_attn.kv_scale"),
    *("mlp.down_proj.input_scale", "mlp.down_proj.input_zero_point", "mlp.down_proj.input_global_scale"),
    *("mlp.down_proj.activation_scale", "mlp.down_proj.output_scale", "mlp.down_proj.qscale_act"),
)


def packed_weight(settings: dict[str, Any], tensors: dict[str, torch.Tensor]) -> PackedWeight:
    """The weight of a module `a.b` with these settings of its checkpoint and these tensors."""
    packing = packing_of(settings, "a checkpoint")
    assert packing is not None
    found = unpacked({f"a.b.{part}": Tensor(tensor) for part, tensor in tensors.items()}, packing)
    assert [*found] == ["a.b.weight"]
    weight: PackedWeight = found["a.b.weight"]
    return weight


def case(name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor]:
    """The settings, tensors and weight of a case."""
    tensors = {}
    for key, array in ARRAYS.items():
        if key.startswith(f"{name}/tensor/"):
            part, eight, _ = key.removeprefix(f"{name}/tensor/").partition(".fp8")
            tensor = torch.from_numpy(array)
            tensors[part] = tensor.view(torch.float8_e4m3fn) if eight else tensor
    return json.loads(str(ARRAYS[f"{name}/settings"])), tensors, torch.from_numpy(ARRAYS[f"{name}/weight"])


class Tensor:
    """A tensor as in a file."""

    def __init__(self, tensor: torch.Tensor):
        self.empty = tensor.to("meta")
        self._tensor = tensor

    def __getitem__(self, _: Any) -> torch.Tensor:
        return self._tensor
