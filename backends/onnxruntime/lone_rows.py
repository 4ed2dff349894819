"""Whether the bits of a row alone are those of the row among others, which depends on kernels and processors."""

from __future__ import annotations

import numpy as np

from outrider.engines.session import Session

LONE_RUNS = 16  # of a row, to find out whether they are equal: on an H100, 4 of 5 sessions varied within 4


def lone_rows_differ(session: Session) -> bool:
    """Return whether a row's bits are different alone than beside another row. Clears the first slot.

    ONNX Runtime's 4-bit products do so on a processor with only AVX2. Tokens would then depend on whether they are decoded
    alone or verified with others.

    Raises:
        EngineError: the backend failed.
    """
    row = session.run(np.array([[1, 2]]), np.array([0]))[0, 0].copy()
    differ = bool((session.run(np.array([[1]]), np.array([0]))[0, 0] != row).any())
    session.clear(0)
    return differ


def lone_rows_vary(session: Session) -> bool:
    """Return whether the result of a row alone varies from run to run. Clears the first slot.

    ONNX Runtime's fp16 products of one row do so on an H100 if they are as long as a 7B model's. Tokens near a tie would
    then differ from run to run, and no replay of a recorded pass would equal the pass.

    Raises:
        EngineError: the backend failed.
    """
    runs = set()
    for _ in range(LONE_RUNS):
        session.unbind()  # a pass that is bound again is not recorded
        runs.add(session.run(np.array([[1]]), np.array([0])).tobytes())
    session.clear(0)
    return len(runs) > 1
