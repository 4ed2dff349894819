"""Which drafted tokens are accepted, and which token is the target's own."""

from __future__ import annotations

import numpy as np

from outrider.engines.errors import EngineError
from outrider.engines.session import Floats


def greedy(logits: Floats) -> list[int]:
    """The most likely token of each row of float32 [S, V] logits; of equals the first.

    Raises:
        EngineError: a row's greatest logit is no finite number.
    """
    tokens = logits.argmax(axis=-1)
    # argmax stops at the first NaN, so looking at the chosen logits finds every NaN of the rows without another pass.
    if not np.isfinite(logits[np.arange(len(tokens)), tokens]).all():
        raise EngineError(
            "the model's logits are not finite numbers (NaN or infinity)",
            "check the checkpoint; an fp16 export may overflow where fp32 or bf16 does not",
        )
    return [int(token) for token in tokens]


def accepted_prefix(drafted: list[int], targets: list[int]) -> int:
    """How many of the drafted tokens, from the first on, are the target's own choice."""
    for index, token in enumerate(drafted):
        if token != targets[index]:
            return index
    return len(drafted)
