"""Read weights that NVIDIA's ModelOpt quantized: FP8, NVFP4, MXFP4 and AWQ's INT4.

The layout of a module follows from its tensors, so one checkpoint may have several ("MIXED_PRECISION").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outrider.errors import UnsupportedModelError
from outrider.export.checkpoints.float_blocks import EXPONENTS, in_bytes, in_fp4, scales_of
from outrider.export.checkpoints.integers import Integers
from outrider.export.checkpoints.packed_weight import GROUPED, OTHERWISE, PackedWeight, Parts, groups_of

RESIDUE = "svdquant_lora_a"  # of NVFP4_SVD: a product of two matrices, added to the weight
MODELOPT = {"weight", "weight_scale", "weight_scale_2", "pre_quant_scale", RESIDUE, "svdquant_lora_b"}


def modelopt(module: str, parts: Parts, settings: Mapping[str, Any]) -> PackedWeight:
    """Read a module.

    Raises:
        UnsupportedModelError: the tensors are in a layout that is not read.
    """
    packed = _packed(module, parts)
    if packed is None or RESIDUE in parts:
        layers = settings.get("quantized_layers")
        own = layers.get(module) if isinstance(layers, dict) else None
        algorithm = (own if isinstance(own, dict) else settings).get("quant_algo")
        raise UnsupportedModelError(f"{module} is quantized by ModelOpt's {algorithm}, which is not read", OTHERWISE)
    if "pre_quant_scale" not in parts or packed.contents:
        return packed
    # The module multiplies its inputs by these, which is to multiply each input's weights.
    return PackedWeight(module, tuple(packed.empty.shape), lambda: packed[...] * parts["pre_quant_scale"][...].float())


def _packed(module: str, parts: Parts) -> PackedWeight | None:
    """Return the weight, of floats without `pre_quant_scale`; None if the layout is not known."""
    weight, scale = parts["weight"], parts["weight_scale"]
    stored, kind, is_twice = weight.empty.dtype, scale.empty.dtype, "weight_scale_2" in parts
    if stored == torch.float8_e4m3fn and not is_twice and (scale.empty.dim() < 2 or kind == EXPONENTS):
        return in_bytes(module, parts)
    if stored == torch.uint8 and is_twice and kind == torch.float8_e4m3fn:
        return in_fp4(module, weight, lambda: scales_of(scale) * parts["weight_scale_2"][...].float())
    if stored == torch.uint8 and not is_twice and kind == EXPONENTS:
        return in_fp4(module, weight, lambda: scales_of(scale))
    if stored == torch.uint8 and not is_twice and kind.itemsize > 1 and scale.empty.dim() == 2:
        return _int4(module, parts)
    return None


def _int4(module: str, parts: Parts) -> PackedWeight:
    """Read integers in two's complement: bytes [N / 2, K] with two outputs, the first in the lower bits."""
    outputs, inputs = 2 * parts["weight"].empty.shape[0], parts["weight"].empty.shape[1]

    def read() -> Any:
        packed, scales = parts["weight"][...], parts["weight_scale"][...].float()
        integers = torch.stack([packed & 15, packed >> 4], 1).flatten(0, 1).to(torch.int8)
        factors = parts["pre_quant_scale"][...].float() if "pre_quant_scale" in parts else None
        return Integers((integers ^ 8) - 8, scales, groups_of(inputs, scales.shape[1]), factors=factors)

    more = {"factors"} if "pre_quant_scale" in parts else set[str]()
    return PackedWeight(module, (outputs, inputs), read, GROUPED | more)
