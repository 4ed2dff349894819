"""The precision of a model that is run by its name."""

from __future__ import annotations

from outrider.engines.precisions import PRECISIONS
from outrider.export.as_is import COMPARED, kept_of, suits, would_keep
from outrider.export.checkpoints.source import Source
from outrider.export.weights.rounding import AS_IS
from outrider.prepare.wanted import Wanted

PRECISION, NEXT_PRECISION, GPU_PRECISION = COMPARED, "int8", "fp16"  # the second if the first costs a model too much
REASONS = {
    AS_IS: "the checkpoint's own 4 bits",
    PRECISION: "the fastest",
    NEXT_PRECISION: f"{PRECISION} costs this model too much",
    GPU_PRECISION: "for a GPU",
}
SMALL = 10**9  # parameters below which as-is may take more time and memory: docs/guides/quantized.md


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
    kept = kept_of(target)
    return AS_IS if suits(target, kept) or (kept is not None and kept.parameters < SMALL) else PRECISION


def weight_bits(precision: str, source: Source) -> float:
    """Return roughly how many bits a weight of a target or draft takes in an export.

    Raises:
        SourceError: the checkpoint has no configuration.
    """
    if precision != AS_IS:
        return PRECISIONS[precision].weight_bits
    if (kept := kept_of(source)) is not None:
        return kept.bits
    own = source.stored_bits() or 0  # a draft that is not quantized is rounded to the least
    return min(each.weight_bits for each in PRECISIONS.values() if each.weight_bits >= own)


def why(precision: str, wanted: Wanted, target: Source) -> str:
    """Return why `default_precision` is what it is, and what as-is brings or would bring."""
    if precision not in (AS_IS, PRECISION) or wanted.lora:
        return REASONS[precision]
    kept = kept_of(target)
    if (precision == AS_IS and suits(target, kept)) or not (keeps := would_keep(target, kept)):
        return REASONS[precision]
    if precision == AS_IS:
        return f"{keeps}, which costs models of less than a billion parameters much accuracy"
    return f"{REASONS[precision]}; {AS_IS} would keep {keeps}"
