"""The precision of a model that is run by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.engines.precisions import PRECISIONS
from outrider.export.checkpoints.source import Source
from outrider.export.weights.rounding import AS_IS
from outrider.prepare.wanted import Wanted

if TYPE_CHECKING:
    from outrider.export.checkpoints.gguf_kept import Kept

PRECISION, NEXT_PRECISION, GPU_PRECISION = "int4", "int8", "fp16"  # the second if the first costs a model too much
REASONS = {
    AS_IS: "the checkpoint's own 4 bits",
    PRECISION: "the fastest",
    NEXT_PRECISION: f"{PRECISION} costs this model too much",
    GPU_PRECISION: "for a GPU",
}
MOST_LARGER = 1.1  # times the memory of `PRECISION` that a file's own numbers may take by default
SMALL = 10**9  # parameters below which they may take more: docs/guides/export.md


def default_precision(wanted: Wanted, target: Source) -> str:
    """Return the precision of a model's export. What a checkpoint stores in 4 bits is not rounded again, unless it is slower.

    What a GGUF file stores of a small model is not rounded again at all: the smaller the model, the more accuracy that costs.
    Adapters change what a checkpoint stores, so that as-is would round those weights to 8 bits.

    Raises:
        SourceError: the checkpoint has no configuration.
    """
    if wanted.device == "cuda":
        return GPU_PRECISION
    if wanted.lora:
        return PRECISION
    if (kept := _kept(target)) is not None:
        return AS_IS if _is_fast(kept) or kept.parameters < SMALL else PRECISION
    return AS_IS if target.stored_bits() == PRECISIONS[PRECISION].weight_bits else PRECISION


def weight_bits(precision: str, source: Source) -> float:
    """Return roughly how many bits a weight of a target or draft takes in an export.

    Raises:
        SourceError: the checkpoint has no configuration.
    """
    if precision != AS_IS:
        return PRECISIONS[precision].weight_bits
    if (kept := _kept(source)) is not None:
        return kept.bits
    own = source.stored_bits() or 0  # a draft that is not quantized is rounded to the least
    return min(each.weight_bits for each in PRECISIONS.values() if each.weight_bits >= own)


def why(precision: str, wanted: Wanted, target: Source) -> str:
    """Return why `default_precision` is what it is, and what as-is brings or would bring."""
    kept = _kept(target) if precision in (AS_IS, PRECISION) and not wanted.lora else None
    if kept is None or (precision == AS_IS and _is_fast(kept)):
        return REASONS[precision]
    memory = f"the file's {kept.kind} weights, in {kept.ratio:.1f} times the memory"
    if precision == AS_IS:
        return f"{memory} of {PRECISION}, which costs models of less than a billion parameters much accuracy"
    return f"{REASONS[precision]}; {AS_IS} would keep {memory}"


def _is_fast(kept: Kept) -> bool:
    """Return whether what as-is keeps runs as fast as `PRECISION`."""
    return kept.ratio <= MOST_LARGER and not kept.offsets


def _kept(target: Source) -> Kept | None:
    """Return what as-is would keep of a GGUF file; None for another checkpoint, or if the file is not here or damaged."""
    if target.gguf is None:
        return None
    from outrider.export.checkpoints.gguf_kept import kept

    try:
        return kept(target.gguf)
    except Exception:  # of any type; the export names what is wrong with the file
        return None
