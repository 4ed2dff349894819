"""Request parameters: every range, at its edges and beyond."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from outrider.errors import UsageError
from outrider.runtime.params import RANGES, SamplingParams

EDGES: dict[str, tuple[list[Any], list[Any]]] = {
    "temperature": ([0, 1e-5, 0.7, np.float32(0.7), 2, 100], [-1, 1e-6, 101, 10**400, math.nan, math.inf, "1", None, True]),
    "top_k": ([-1, 0, 1, np.int64(3), 10**6], [-2, 1.5, "1", None, True]),
    "top_p": ([1e-6, 0.9, 1], [0, -0.1, 1.01, math.nan, None]),
    "min_p": ([0, 0.05, 1], [-0.1, 1.1, None]),
    "repetition_penalty": ([0.01, 1, 100], [0, -1, 1e-38, 1e39, math.inf]),
    "presence_penalty": ([-2, 0, 2], [-2.1, 2.1]),
    "frequency_penalty": ([-2, 0, 2], [-2.1, 2.1]),
    "seed": ([None, 0, -(2**63), 2**64 - 1], [2**64, -(2**63) - 1, 1.5, 10**400]),
    "max_new_tokens": ([1, 10**6], [0, -1, None, 2.0]),
    "min_new_tokens": ([0, 256], [-1, 257, None]),
    "logprobs": ([None, 0, 20], [-1, 21, 1.0]),
    "rule": (["rejection", "exact-match", None], ["", "typical", 1]),
    "stop": ([(), None, "a", ["a", "b"], "a" * 1000], ["", ["a", ""], [1], 5, "a" * 1001]),
    "stop_token_ids": ([(), None, [1], {2}], [5]),
    "logit_bias": ([{}, None, {1: 100, 2: -100.0}], [{1: 101}, {1: math.nan}, {1: "1"}, [1], 5]),
}


@pytest.mark.parametrize("name", EDGES)
def test_ranges(name: str) -> None:
    inside, outside = EDGES[name]
    for value in inside:
        SamplingParams(**{name: value})
    for value in outside:
        with pytest.raises(UsageError, match=f"{name} is .*; it must be ") as caught:
            SamplingParams(**{name: value})
        assert caught.value.hint
        assert len(str(caught.value)) < 200


def test_every_range_is_tested() -> None:
    assert RANGES.keys() <= EDGES.keys()


@pytest.mark.parametrize("params", [{"logit_bias": {320: 1}}, {"logit_bias": {-1: 1}}, {"stop_token_ids": [320]}])
def test_tokens_that_the_target_lacks_are_refused(params: dict[str, Any]) -> None:
    asked = SamplingParams(**params)
    with pytest.raises(UsageError, match="token ids 0 to 319"):
        asked.check_tokens(320)


def test_what_can_be_read_only_once_is_read_once() -> None:
    params = SamplingParams(stop=(text for text in ("a", "b")), stop_token_ids=iter([1, 2]))
    assert params.stop_strings == ("a", "b")
    assert params.stop_tokens == (1, 2)
    params.check_tokens(3)
    assert params.stop_tokens == (1, 2)
