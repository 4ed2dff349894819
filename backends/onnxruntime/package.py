"""Parts of this backend that do not import ONNX Runtime."""

from __future__ import annotations

EXTRA = "cpu"
MASK_FREE = "attention without a mask"  # a rewrite for CUDA whose result also runs on the CPU


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
