"""Types that NumPy lacks."""

from __future__ import annotations

import numpy as np
import torch

from outrider.engines.precisions import DTYPES


def test_bf16_is_rounded_as_torch_does() -> None:
    """To the nearest, and to even between two."""
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    values = np.append(values, [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0, 2**-130, 1e38]).astype(np.float32)
    held = DTYPES["bfloat16"].encode(values)
    want = torch.from_numpy(values).to(torch.bfloat16)
    assert (held == want.view(torch.int16).numpy().view(np.uint16)).all()
    assert (DTYPES["bfloat16"].decode(held) == want.float().numpy()).all()
