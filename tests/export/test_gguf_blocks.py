"""Blocks of quantized GGUF tensors are read as the package `gguf` does."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from outrider.export.checkpoints.gguf_blocks import BLOCKS
from outrider.tests.export.quantized import HALVES


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_they_have_the_same_numbers(kind: gguf.GGMLQuantizationType) -> None:
    random = np.random.default_rng(0)
    size, bytes_ = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (2000, bytes_), dtype=np.uint8)
    for at in HALVES.get(kind.name, [0, 2]):
        blocks[:, at : at + 2] = random.standard_normal(2000).astype(np.float16)[:, None].view(np.uint8)
    numbers = torch.empty(2000 * size)
    BLOCKS[kind](torch.from_numpy(blocks)).dequantize(numbers)
    want = gguf.dequantize(blocks, kind)
    np.testing.assert_array_equal(numbers.view(torch.int32).numpy(), want.flatten().view(np.int32))
