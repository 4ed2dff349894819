"""Types of tensors and precisions of models: a table of names for each type, and of tolerances for each precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.engines.arrays import Floats


@dataclass(frozen=True, slots=True)
class DType:
    """A type of tensor elements, with each library's name for it."""

    numpy: np.dtype[Any]  # holds the elements on the host; NumPy has no bfloat16, so uint16 holds its bits
    onnx: int  # `TensorProto.DataType`
    onnxruntime: str  # the type of a session's input or output
    tensorrt: str  # the member of `DataType`
    openvino: str  # the name of `Type`

    def encode(self, values: Floats) -> npt.NDArray[Any]:
        """Return float32 values in this type's host representation, rounded to nearest, ties to even."""
        if self.onnxruntime != "tensor(bfloat16)":
            return values.astype(self.numpy)
        bits = values.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(self.numpy)

    def decode(self, held: npt.NDArray[Any]) -> Floats:
        """Return float32 values from this type's host representation."""
        if self.onnxruntime != "tensor(bfloat16)":
            return held.astype(np.float32)
        return (held.astype(np.uint32) << 16).view(np.float32)


DTYPES = {
    "int64": DType(np.dtype(np.int64), 7, "tensor(int64)", "INT64", "i64"),
    "float32": DType(np.dtype(np.float32), 1, "tensor(float)", "FLOAT", "f32"),
    "float16": DType(np.dtype(np.float16), 10, "tensor(float16)", "HALF", "f16"),
    "bfloat16": DType(np.dtype(np.uint16), 16, "tensor(bfloat16)", "BF16", "bf16"),
    "uint8": DType(np.dtype(np.uint8), 2, "tensor(uint8)", "UINT8", "u8"),
}


@dataclass(frozen=True, slots=True)
class Precision:
    """The precision of a model's weights.

    Tolerances are relative to the largest logit in magnitude, or to 1 if that is less.
    """

    weight_bits: int
    dtype: str  # key of `DTYPES`, for the cache and everything except quantized weights
    parity: float  # the exported graph against the checkpoint, both on the CPU
    fusion: float  # the graph fused for ONNX Runtime against the exported graph
    comparison: float  # a bundle's engines against ONNX Runtime on the CPU (`outrider verify --engines`)
    unrounded: float  # the same, if neither rounds activations


# Parity: in fp32 only the order of sums differs. In fp16 and bf16 the checkpoint rounds after each operation (11 and 8
# significant bits), but the graph on ONNX Runtime rounds only its weights; a few roundings per layer add up. A quantized
# graph computes in fp32, and so does the quantized checkpoint that it is compared with.
# Fusion: another order of the same sums. The difference is larger if activations are rounded to int8.
# Comparison: a few roundings in the type. With quantized weights, ONNX Runtime rounds activations to int8. That alone moved the
# logits of the pair in examples/tiny-pair by 1e-2, and those of a 1.5B model by 20% of the largest logit. Without this
# rounding, only the order of sums differs.
PRECISIONS = {
    "fp32": Precision(32, "float32", parity=1e-4, fusion=1e-3, comparison=1e-3, unrounded=1e-3),
    "fp16": Precision(16, "float16", parity=2e-2, fusion=2e-2, comparison=2e-2, unrounded=2e-2),
    "bf16": Precision(16, "bfloat16", parity=1e-1, fusion=1.6e-1, comparison=1.6e-1, unrounded=1.6e-1),
    "int8": Precision(8, "float32", parity=1e-4, fusion=5e-2, comparison=4e-2, unrounded=1e-3),
    "int4": Precision(4, "float32", parity=1e-4, fusion=5e-2, comparison=4e-2, unrounded=1e-3),
}

# For each number of bits, the largest block of quantized weights for which ONNX Runtime's CPU kernels compute a row to the same
# bits whatever the number of rows. Larger blocks are faster, but less accurate.
BATCH_INVARIANT_BLOCK = {4: 32, 8: 64}
