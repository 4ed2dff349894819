"""Which checkpoints `--precision as-is` suits: those whose own integers run as fast as int4, in as little memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.engines.precisions import PRECISIONS
from outrider.export.checkpoints.source import Source
from outrider.export.weights.rounding import AS_IS

if TYPE_CHECKING:
    from outrider.export.checkpoints.gguf_kept import Kept

COMPARED = "int4"  # the precision that as-is is compared with
UNQUANTIZED = "fp32"  # the precision of an export of what as-is does not suit
MOST_LARGER = 1.1  # times the memory of `COMPARED` that a file's own numbers may take: docs/guides/quantized.md


def suits(source: Source, kept: Kept | None) -> bool:
    """Return whether as-is suits a checkpoint. Of a GGUF file, offsets need a second product.

    Args:
        kept: what `kept_of` returns.

    Raises:
        SourceError: the checkpoint has no configuration.
    """
    if source.gguf is None:
        return source.stored_bits() == PRECISIONS[COMPARED].weight_bits and not source.reorders()
    return kept is not None and kept.ratio <= MOST_LARGER and not kept.offsets


def kept_of(source: Source) -> Kept | None:
    """Return what as-is would keep of a GGUF file; None for another checkpoint, or if the file is not here or damaged."""
    if source.gguf is None:
        return None
    from outrider.export.checkpoints.gguf_kept import kept

    try:
        return kept(source.gguf)
    except Exception:  # of any type; the export names what is wrong with the file
        return None


def default_precision(target: Source, adapted: bool) -> tuple[str, str]:
    """Return the precision of an export that names none, and why, if that needs to be said.

    Adapters change what a checkpoint stores, so its integers cannot be kept.

    Args:
        target: a checkpoint that is on this machine.
        adapted: whether adapters are merged into it.
    """
    if adapted:
        return UNQUANTIZED, ""
    if suits(target, kept := kept_of(target)):
        return AS_IS, f"keeping the integers of {target.name}, which is the default (--precision {AS_IS})"
    would = would_keep(target, kept)
    return UNQUANTIZED, f"dequantizing; --precision {AS_IS} would keep {would}" if would else ""


def would_keep(source: Source, kept: Kept | None) -> str:
    """Return what as-is keeps of a checkpoint, and what that costs against int4; empty if it keeps nothing. See `suits`."""
    if kept is not None:
        return f"the file's {kept.kind} weights, in {kept.ratio:.1f} times the memory of {COMPARED}"
    bits = source.stored_bits()
    return f"its integers of {bits} bits{', up to a fifth slower' if source.reorders() else ''}" if bits else ""
