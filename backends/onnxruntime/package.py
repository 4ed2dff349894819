"""Names that the modules of this backend share without importing ONNX Runtime."""

from __future__ import annotations

EXTRA = "cpu"
MASK_FREE = "attention without a mask"  # a rewrite for CUDA whose result also runs on the CPU
