"""How weights are rounded, and the block sizes that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.engines.precisions import BATCH_INVARIANT_BLOCK, PRECISIONS

BITS = {name: precision.weight_bits for name, precision in PRECISIONS.items() if precision.weight_bits <= 8}
BLOCKS = (128, 64, 32)  # inputs that share a scale; a layer with less than two whole blocks stays in fp32
METHODS = ("rtn", "auto-round")
AS_IS = "as-is"  # the method that keeps the integers of a quantized checkpoint, and rounds the rest to `head_precision`


@dataclass(frozen=True, slots=True)
class Rounding:
    """How to round weights."""

    precision: str  # int4 or int8
    # Precision of the output head: int4, int8 or fp32. No later layer evens out the head's errors. With 8 bits, perplexity does
    # not change; with 4 bits, the head alone loses nearly a fifth of what all other layers lose together.
    head_precision: str = "int8"
    method: str = "rtn"  # one of METHODS, for all layers but the head
    text: str = ""  # for calibration
    group_size: int | None = None  # the largest block to use, one of BLOCKS; None is BATCH_INVARIANT_BLOCK

    def for_draft(self, head_precision: str | None) -> Rounding:
        """Return the fastest variant, for a draft, because a draft's errors only cost acceptance.

        `head_precision` overrides the precision of the output head unless it is None.
        """
        return replace(self, group_size=self.group_size or BLOCKS[0], head_precision=head_precision or self.precision)

    def max_block(self, bits: int) -> int:
        """Return the largest number of inputs that share a scale."""
        return self.group_size or BATCH_INVARIANT_BLOCK[bits]

    def block_for(self, inputs: int, bits: int) -> int | None:
        """Return how many inputs share a scale in a layer with `inputs` inputs; None if the layer cannot be quantized.

        A layer never has only one block, because TensorRT-RTX's compiler fails on it.
        """
        limit = self.max_block(bits)
        return next((block for block in BLOCKS if block <= limit and inputs % block == 0 and block < inputs), None)
