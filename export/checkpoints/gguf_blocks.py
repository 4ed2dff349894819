"""Read the blocks of quantized GGUF tensors: integers, and the scale and offset of each group of them.

The formats are those of ggml's `ggml-quants.h`. The package `gguf` dequantizes all of them with numpy, which takes several
times as long as torch, so the usual ones are here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import gguf
import torch


class Groups(NamedTuple):
    """The numbers of N blocks, scale * integer + offset, in G groups of S with one scale and offset."""

    integers: torch.Tensor  # int8 [N, G, S]
    scales: torch.Tensor  # float32 [N, G]
    offsets: torch.Tensor | None  # float32 [N, G]; None if all are 0

    def dequantize(self, numbers: torch.Tensor) -> None:
        """Write the numbers to float32 [N * G * S]."""
        numbers = numbers.view(self.integers.shape).copy_(self.integers).mul_(self.scales[..., None])
        if self.offsets is not None:
            numbers.add_(self.offsets[..., None])

    def write(self, content: str, numbers: torch.Tensor) -> None:
        """Write one of `integers.CONTENTS` of each number to float32 [N * G * S]."""
        numbers = numbers.view(self.integers.shape)
        if content == "integers":
            numbers.copy_(self.integers)
        elif content == "scales":
            numbers.copy_(self.scales[..., None])
        elif content == "offsets" and self.offsets is not None:
            numbers.copy_(self.offsets[..., None])
        else:
            numbers.zero_()


def _half(data: torch.Tensor, at: int) -> torch.Tensor:
    """Return the fp16 number at a byte of each block [N, B] as float32 [N, 1]."""
    return data[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(data: torch.Tensor, size: int) -> torch.Tensor:
    """Return int8 [N, G, size] of bytes [N, B]: groups of `size` bytes have the low halves of a group, then the high ones."""
    data = data.reshape(len(data), -1, size)
    return torch.stack((data & 15, data >> 4), 2).reshape(len(data), -1, size).view(torch.int8)


def _bits(data: torch.Tensor) -> torch.Tensor:
    """Return the bits of bytes [N, B], from the lowest on, as int8 [N, B * 8]."""
    return ((data[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1).view(torch.int8)


def _q4_0(data: torch.Tensor) -> Groups:
    return Groups((_nibbles(data[:, 2:], 16) - 8).reshape(-1, 1, 32), _half(data, 0), None)


def _q4_1(data: torch.Tensor) -> Groups:
    return Groups(_nibbles(data[:, 4:], 16).reshape(-1, 1, 32), _half(data, 0), _half(data, 2))


def _q5_0(data: torch.Tensor) -> Groups:
    integers = _nibbles(data[:, 6:], 16).reshape(-1, 32) + (_bits(data[:, 2:6]) << 4) - 16
    return Groups(integers[:, None], _half(data, 0), None)


def _q5_1(data: torch.Tensor) -> Groups:
    integers = _nibbles(data[:, 8:], 16).reshape(-1, 32) + (_bits(data[:, 4:8]) << 4)
    return Groups(integers[:, None], _half(data, 0), _half(data, 2))


def _q8_0(data: torch.Tensor) -> Groups:
    return Groups(data[:, None, 2:].view(torch.int8), _half(data, 0), None)


def _scales_of_k(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and offsets, float32 [N, 8]: six bits each in 12 bytes, times the block's two fp16 numbers."""
    low, high, rest = data[:, 4:8], data[:, 8:12], data[:, 12:16]
    scales = torch.cat((low & 63, (rest & 15) | (low >> 6 << 4)), 1)
    minima = torch.cat((high & 63, (rest >> 4) | (high >> 6 << 4)), 1)
    return _half(data, 0) * scales, -(_half(data, 2) * minima)


def _q4_k(data: torch.Tensor) -> Groups:
    return Groups(_nibbles(data[:, 16:], 32), *_scales_of_k(data))


def _q5_k(data: torch.Tensor) -> Groups:
    highest = (data[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    return Groups(_nibbles(data[:, 48:], 32) | (highest << 4).view(torch.int8), *_scales_of_k(data))


def _q6_k(data: torch.Tensor) -> Groups:
    low = _nibbles(data[:, :128], 64).reshape(-1, 8, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = (data[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3).reshape(-1, 8, 32).view(torch.int8)
    integers = (low | high << 4) - 32
    return Groups(integers.reshape(-1, 16, 16), _half(data, 208) * data[:, 192:208].view(torch.int8), None)


_Type = gguf.GGMLQuantizationType
BLOCKS: dict[gguf.GGMLQuantizationType, Callable[[torch.Tensor], Groups]] = {
    _Type.Q4_0: _q4_0,
    _Type.Q4_1: _q4_1,
    _Type.Q5_0: _q5_0,
    _Type.Q5_1: _q5_1,
    _Type.Q8_0: _q8_0,
    _Type.Q4_K: _q4_k,
    _Type.Q5_K: _q5_k,
    _Type.Q6_K: _q6_k,
}
"""Functions that read blocks, uint8 [N, bytes of a block]."""
