"""Keep the integers of a quantized checkpoint for the kernels, instead of rounding its weights again.

transformers' loader renames, splits, joins and permutes weights. To learn what becomes of their integers, scales, zero points
and offsets, the loader also runs over each of these in place of the weights. The result must compute the weights to the bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from outrider.export.checkpoints.integers import CONTENTS
from outrider.export.checkpoints.streamed import Streamed
from outrider.export.weights.rounding import BLOCKS

FINEST = 16  # inputs per scale; kernels know no smaller blocks
ROWS_AT_ONCE = 2**9


class Form(NamedTuple):
    """Weights [K, N] = factors (scale (quantized - zero) + offset) in the layout of `DequantizeLinear`, in blocks of inputs."""

    quantized: torch.Tensor  # int8 or uint8 [K, N], with values of `bits` bits
    scale: torch.Tensor  # float32 [K / block, N]
    bits: int  # 4 or 8
    zero: torch.Tensor | None = None  # of the type of `quantized` [K / block, N]; then `quantized` has no sign
    offset: torch.Tensor | None = None  # float32 [K / block, N]
    order: torch.Tensor | None = None  # int64 [K], the inputs in the order of the blocks
    factors: torch.Tensor | None = None  # float32 [K], of the inputs in this order

    @property
    def is_one_product(self) -> bool:
        """Whether the inputs themselves are multiplied with the weights, and nothing is added."""
        return self.offset is None and self.order is None and self.factors is None

    def in_bytes(self) -> Form:
        """Return the same weights in 8 bits without zero points. Those of 4 bits always have such a form."""
        if self.zero is None:
            return self._replace(bits=8)
        zeros = self.zero.to(torch.int16).repeat_interleave(len(self.quantized) // len(self.zero), 0)
        return self._replace(quantized=(self.quantized - zeros).to(torch.int8), bits=8, zero=None)

    def tensors(self) -> dict[str, torch.Tensor | None]:
        """Return the tensors by name."""
        return {name: each for name, each in self._asdict().items() if name != "bits"}

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Form:
        """Apply a function to the tensors."""
        made: dict[str, Any] = {name: None if each is None else function(each) for name, each in self.tensors().items()}
        return self._replace(**made)


@dataclass(slots=True)
class StoredWeight:
    """What the checkpoint stores for a matrix, or for several of the same shape, with [..., K] weights.

    Scales, zero points and offsets are kept for `FINEST` inputs.
    """

    order: torch.Tensor | None = None  # int64 [K]; None if groups follow each other
    integers: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # int8 or uint8 [..., K], in this order
    scales: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # float32 [..., K / 16]
    zeros: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    factors: torch.Tensor | None = None  # float32 [K], in this order
    fits: bool = True  # whether groups are multiples of `FINEST`, the same for all outputs

    def add(self, content: str, values: torch.Tensor) -> None:
        """Add one of `CONTENTS`, float32 [..., K], in their order."""
        if content == "groups":
            groups = values.flatten(0, -2)
            self.fits = bool((groups == groups[0]).all())
            order = groups[0].argsort(stable=True)
            self.order = None if torch.equal(order, torch.arange(len(order))) else order
            return
        values = values if self.order is None else values[..., self.order]
        if content == "factors":
            factors = values.flatten(0, -2)
            self.fits &= bool((factors == factors[0]).all())
            self.factors = factors[0].clone() if (factors != 1).any() else None
        elif content == "integers":
            self.fits &= values.shape[-1] % FINEST == 0 and bool(values.min() >= -128) and bool(values.max() <= 255)
            self.integers = values.to(torch.int8 if values.min() < 0 else torch.uint8)
        elif self.fits:
            values = values.reshape(*values.shape[:-1], -1, FINEST)
            self.fits = bool((values == values[..., :1]).all())
            setattr(self, content, values[..., 0].contiguous() if content == "scales" or values.any() else None)

    def of(self, index: int) -> StoredWeight:
        """Return what is stored of one of several matrices."""
        scales, zeros, offsets = (None if each is None else each[index] for each in (self.scales, self.zeros, self.offsets))
        assert scales is not None
        return StoredWeight(self.order, self.integers[index], scales, zeros, offsets, self.factors, self.fits)

    def form(self, weight: torch.Tensor, most: int) -> Form | None:
        """Return the smallest form that has exactly a matrix's numbers, in blocks of at most `most` inputs, or None.

        Args:
            weight: what the checkpoint's numbers are for the model, float32 [N, K].
            most: the most inputs per scale; one of `BLOCKS`.
        """
        if not self.fits or self.integers.shape != weight.shape:
            return None
        outputs, inputs = weight.shape
        parts = [self.scales, self.zeros, self.offsets]
        sizes = [each for each in (*BLOCKS, FINEST) if each <= most and inputs % each == 0 and each < inputs]
        block = next((size for size in sizes if all(_repeat(each, size // FINEST) for each in parts if each is not None)), None)
        if block is None:
            return None
        scale, zero, offset = (None if each is None else each[:, :: block // FINEST] for each in parts)
        smallest = _smallest(self.integers.reshape(outputs, -1, block), zero)
        if smallest is None or scale is None:
            return None
        values, zero, bits = smallest
        for at in range(0, outputs, ROWS_AT_ONCE):
            rows = slice(at, at + ROWS_AT_ONCE)
            integers = values[rows] if zero is None else values[rows].to(torch.int16) - zero[rows, :, None]
            numbers = integers * scale[rows, :, None]
            numbers = numbers if offset is None else numbers + offset[rows, :, None]
            numbers = numbers if self.factors is None else numbers * self.factors.reshape(-1, block)
            wanted = weight[rows] if self.order is None else weight[rows, self.order]
            if not torch.equal(numbers.reshape(wanted.shape), wanted):
                return None
        form = Form(values.reshape(outputs, inputs), scale, bits, zero, offset)
        return form.map(lambda each: each.T.contiguous())._replace(order=self.order, factors=self.factors)


def _smallest(values: torch.Tensor, zero: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None, int] | None:
    """Return integers [N, G, block] and zero points [N, G] of the fewest bits with the same differences, and these bits.

    The result is int8 without zero points if it can be, otherwise uint8; None if eight bits do not suffice.
    """
    differences = values if zero is None else values.to(torch.int16) - zero[..., None].to(torch.int16)
    low, high = int(differences.min()), int(differences.max())
    zeros = torch.zeros(values.shape[:2]) if zero is None else zero
    lowest, highest = min(int(values.min()), int(zeros.min())), max(int(values.max()), int(zeros.max()))
    for bits in (4, 8):
        limit = 2 ** (bits - 1)
        if -limit <= low and high < limit:
            return differences.to(torch.int8), None, bits
        if highest - lowest < 2 * limit:
            return (values.to(torch.int16) - lowest).to(torch.uint8), (zeros - lowest).to(torch.uint8), bits
    return None


def _repeat(rows: torch.Tensor, count: int) -> bool:
    """Return whether each `count` consecutive numbers of a row are equal."""
    runs = rows.reshape(len(rows), -1, count)
    return bool((runs == runs[..., :1]).all())


def stored_weights(weights: Streamed, part: str) -> dict[str, StoredWeight]:
    """Return the weights of a part that the checkpoint stores as integers, by the parameters' names."""
    found: dict[tuple[str, ...], StoredWeight] = defaultdict(StoredWeight)
    for content in CONTENTS:
        for names, values in weights.contents(part, content).items():
            found[names].add(content, values)
    return {name: stored for names, stored in found.items() for name in names}
