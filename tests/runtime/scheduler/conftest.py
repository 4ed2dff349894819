"""A bundle with several slots, and what its requests get alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.runtime.generation import Outrider
from outrider.tests.runtime.policies import short_windows
from outrider.tests.runtime.scheduler.schedules import CAPACITY, PARAMS, PROMPTS, SLOTS, SLOW, Alone
from outrider.tests.support import build, make_endless


@pytest.fixture(scope="module", params=["onnxruntime int4", "openvino int4", *SLOW])
def bundle(
    request: pytest.FixtureRequest, trained_exports: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The shipped pair. A row has the same bits in any batch; at fp32 on ONNX Runtime nearly so. No token ends the text."""
    backend, precision = request.param.split()
    made = tmp_path_factory.mktemp(backend) / "bundle"
    build(trained_exports(precision), made, backend=backend, k=[1, 2, 4], capacity=CAPACITY, batch=SLOTS)
    make_endless(made)
    return made


@pytest.fixture(scope="module")
def batched(bundle: Path) -> Iterator[Outrider]:
    with short_windows():
        yield Outrider.load(bundle, slots=None)


@pytest.fixture(scope="module")
def alone(bundle: Path) -> Alone:
    """The longest text of a prompt and parameters, by plain decoding."""
    single = Outrider.load(bundle)

    @functools.cache
    def answer(prompt: int, params: int) -> list[int]:
        events = single.generate(PROMPTS[prompt], replace(PARAMS[params], max_new_tokens=50), k=0)
        return [token for event in events for token in event.token_ids]

    return answer
