"""The target with recurrent layers in examples/tiny-hybrid: bundles of it, and what its requests get alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.tests.runtime.test_golden import tokens
from outrider.tests.support import build, make_endless

K, CHUNK = (1, 2, 4, 8), 16
SHORT = "two layers"  # in fp32
WHOLE = pytest.param("fp32", marks=pytest.mark.slow)
CAPACITY, SLOTS = 191, 3  # with the spare position, so that a slot's cache begins at an aligned address


def endless(export: Path, folder: Path, k: Sequence[int]) -> Path:
    """A bundle in which no token ends the text."""
    build(export, folder, k=[*k], capacity=CAPACITY, batch=SLOTS, max_prompt_chunk=CHUNK)
    make_endless(folder)
    return folder


def alone(single: Outrider, prompt: list[int], params: SamplingParams) -> list[int]:
    return tokens(list(single.generate(prompt, params, k=0)))
