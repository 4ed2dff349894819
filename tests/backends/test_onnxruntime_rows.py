"""ONNX Runtime on the CPU: a row of a quantized target has the same bits alone and among others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from outrider.backends.open import open_bundle, open_engines
from outrider.engines.session import GraphSession

SLOTS, BEGIN, CHUNK = 2, 48, 16
TEXT = np.random.default_rng(0).integers(0, 4096, (1, BEGIN + CHUNK))


@pytest.fixture(params=["int4", "int8"])
def session(request: pytest.FixtureRequest, shipped_bundles: Callable[..., Path]) -> GraphSession:
    bundle = shipped_bundles(request.param, batch=SLOTS, k=[1, 4])
    made = open_engines(bundle, *open_bundle(bundle)).session("target", SLOTS)
    assert isinstance(made, GraphSession)
    assert all((cache == 0).all() for cache in made.cache().values())  # what was compared when it was loaded is gone
    return made


@pytest.mark.parametrize("paired", [False, True], ids=["as this processor needs", "paired"])
def test_rows_have_the_same_bits(session: GraphSession, paired: bool) -> None:
    if paired:  # on every processor, so that this path is tested on all
        session._fewest_rows = 2
    for at in range(0, BEGIN, CHUNK):
        session.write(TEXT[:, at : at + CHUNK], np.array([at]), 1)
    want = session.run(TEXT[:, BEGIN:], np.array([BEGIN]), 1)[0].copy()
    for count in (1, 2, 3, 4, 5, 9):
        got = session.run(TEXT[:, BEGIN : BEGIN + count], np.array([BEGIN]), 1)[0]
        np.testing.assert_array_equal(got, want[:count])
    for row in range(CHUNK):
        at = BEGIN + row
        np.testing.assert_array_equal(session.run(TEXT[:, at : at + 1], np.array([at]), 1)[0, 0], want[row])


def test_the_last_position_of_a_slot_is_its_own(session: GraphSession) -> None:
    """A row that keeps another company must not be written into the next slot."""
    session._fewest_rows = 2
    session.write(TEXT[:, :8], np.array([0]), 1)
    before = {name: cache.copy() for name, cache in session.cache().items()}
    session.write(TEXT[:, :1], np.array([session.capacity - 1]), 0)
    for name, cache in session.cache().items():
        np.testing.assert_array_equal(cache[1], before[name][1])
        assert (cache[0, :, session.capacity - 1] != 0).any()
