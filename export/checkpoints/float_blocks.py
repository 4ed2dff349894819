"""Weights stored in FP8, FP4 or bytes, with a scale for each tensor, row, group of inputs or block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from outrider.export.checkpoints.integers import Integers
from outrider.export.checkpoints.packed_weight import GROUPED, PackedWeight, Parts, groups_of

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
EXPONENTS = torch.uint8  # the dtype in which files store powers of two (E8M0)


def in_bytes(module: str, parts: Parts, blocks: tuple[int, int] = (0, 0)) -> PackedWeight:
    """Read integers or FP8, with one scale for a tensor, rows, groups of inputs or blocks of N and K."""
    outputs, inputs = parts["weight"].empty.shape

    def spread(part: str) -> Any:
        values = scales_of(parts[part])
        values = values.reshape(len(values), -1) if values.dim() else values.reshape(1, 1)
        return _spread(values, (outputs, inputs), blocks)

    def read() -> Any:
        zeros = spread("weight_zero_point") if "weight_zero_point" in parts else None
        return Integers(parts["weight"][...].float(), spread("weight_scale"), torch.arange(inputs), zeros)

    if parts["weight"].empty.dtype.is_floating_point:
        return PackedWeight(module, (outputs, inputs), lambda: read().weight())
    more = {"zeros"} if "weight_zero_point" in parts else set()
    return PackedWeight(module, (outputs, inputs), read, GROUPED | more)


def in_blocks(name: str, weight: Any, scale: Any, blocks: tuple[int, int]) -> PackedWeight:
    """Read FP8 [..., N, K] with one scale for all numbers, or for blocks of N and K; (0, 0) if their sizes are not known."""
    shape = tuple(weight.empty.shape)

    def read() -> torch.Tensor:
        numbers: torch.Tensor = weight[...].float()
        scales = scales_of(scale)
        return numbers * (scales if scales.numel() == 1 else _spread(scales, shape, blocks))

    return PackedWeight(name, shape, read)


def in_fp4(module: str, packed: Any, scales: Callable[[], torch.Tensor]) -> PackedWeight:
    """Read FP4 (E2M1): bytes [N, K / 2] with two inputs, the first in the lower bits, and scales, float32 [N, G]."""
    outputs, bytes_ = packed.empty.shape
    return PackedWeight(module, (outputs, 2 * bytes_), lambda: fp4(packed[...], scales()))


def fp4(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the weights in FP4, float32 [N, K], as in `in_fp4`."""
    packed = packed.view(torch.uint8)
    values = E2M1[torch.stack([packed & 15, packed >> 4], -1).flatten(1).int()]
    return Integers(values, scales, groups_of(values.shape[1], scales.shape[1])).weight()


def scales_of(tensor: Any) -> torch.Tensor:
    """Return the numbers of a tensor of scales, float32."""
    values: torch.Tensor = tensor[...]
    return (values.view(torch.float8_e8m0fnu) if values.dtype == EXPONENTS else values).float()


def _spread(scales: torch.Tensor, shape: tuple[int, ...], blocks: tuple[int, int]) -> torch.Tensor:
    """Return the scale of each number of [..., N, K], for blocks of N and K. The last block may be cut."""
    for axis, block in zip((-2, -1), blocks, strict=True):
        size, count = shape[axis], scales.shape[axis]
        width = block or max(1, size // count)
        if -(-size // width) != count:
            raise ValueError(f"{count} scales for {size} numbers in blocks of {width}")
        scales = scales.repeat_interleave(width, axis).narrow(axis, 0, size)
    return scales
