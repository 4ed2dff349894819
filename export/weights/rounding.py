"""The options of quantization, and the block sizes that follow from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from outrider.engines.precisions import BATCH_INVARIANT_BLOCK, PRECISIONS
from outrider.errors import UsageError

BITS = {name: precision.weight_bits for name, precision in PRECISIONS.items() if precision.weight_bits <= 8}
BLOCKS = (128, 64, 32)  # inputs that share a scale; a layer needs at least two whole blocks, or else stays in fp32
METHODS = ("rtn", "auto-round")


@dataclass(frozen=True, slots=True)
class Rounding:
    """How to round weights."""

    precision: str  # int4 or int8
    # Precision of the output head: int4, int8 or fp32. No later layer evens out the head's errors. With 8 bits the loss does
    # not show in perplexity; with 4 bits the head alone loses nearly a fifth of what all other layers lose together.
    head_precision: str = "int8"
    method: str = "rtn"  # one of METHODS, for all layers but the head
    text: str = ""  # for calibration
    group_size: int | None = None  # the largest block to use, one of BLOCKS; None is BATCH_INVARIANT_BLOCK

    @classmethod
    def from_options(
        cls,
        precision: str,
        head_precision: str | None,
        method: str | None,
        calibration: Path | None,
        group_size: int | None,
    ) -> Rounding | None:
        """Return the rounding that options of the command line describe; None if weights are not quantized.

        Raises:
            UsageError: the options contradict each other, or the calibration text cannot be read.
        """
        options = {
            "--head-precision": head_precision,
            "--method": method,
            "--calibration": calibration,
            "--group-size": group_size,
        }
        if precision not in BITS:
            if unused := [name for name, value in options.items() if value is not None]:
                raise UsageError(f"{unused[0]} does not go with --precision {precision}", "add --precision int4 or int8")
            return None
        if (method == "auto-round") != (calibration is not None):
            raise UsageError("--method auto-round and --calibration go together", "use both or neither")
        if method == "auto-round" and precision != "int4":
            raise UsageError("--method auto-round is for --precision int4", "leave it out: eight bits need no tuning")
        try:
            text = calibration.read_text(encoding="utf-8") if calibration is not None else ""
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read {calibration}: {error}", "pass a UTF-8 text file as --calibration") from error
        return cls(precision, head_precision or "int8", method or "rtn", text, group_size)

    def for_draft(self, head_precision: str | None) -> Rounding:
        """Return the fastest variant, for the draft, whose errors cost acceptance and nothing else.

        The head has `head_precision` if that is not None.
        """
        return replace(self, group_size=self.group_size or BLOCKS[0], head_precision=head_precision or self.precision)

    def max_block(self, bits: int) -> int:
        """Return the maximum number of inputs that share a scale."""
        return self.group_size or BATCH_INVARIANT_BLOCK[bits]

    def block_for(self, inputs: int, bits: int) -> int | None:
        """Return the number of inputs that share a scale in a layer with `inputs` inputs; None if it cannot be quantized.

        A layer never has just one block, because TensorRT-RTX's compiler fails on it.
        """
        limit = self.max_block(bits)
        return next((block for block in BLOCKS if block <= limit and inputs % block == 0 and block < inputs), None)
