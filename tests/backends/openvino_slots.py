"""Sessions on OpenVINO with several slots, the precisions that they are tested in, and the logits of rows of a text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from outrider.backends.open import open_bundle, open_engines
from outrider.engines.arrays import Floats, Int64s
from outrider.engines.session import Session

# The golden tests have all of them in `make test`, too.
PRECISIONS = ("int4", *(pytest.param(each, marks=pytest.mark.slow) for each in ("fp32", "fp16", "bf16", "int8")))
SLOTS = 3
TEXT = np.random.default_rng(0).integers(1, 1024, (1, 150))


def target(bundle: Path) -> Session:
    return open_engines(bundle, *open_bundle(bundle)).session("target", batch=SLOTS)


def rows(session: Session, first: int, last: int, slots: Int64s) -> Floats:
    """Return the logits of some rows of the text, in several slots at once."""
    ids = np.repeat(TEXT[:, first:last], len(slots), 0)
    return session.run(ids, np.full(len(slots), first), int(slots[0])).copy()
