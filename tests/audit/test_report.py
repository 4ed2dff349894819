"""What an audit calls a failure, from counts and texts that a test has made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outrider.audit import texts as texts_module
from outrider.audit.report import NEAR_TIES, ROUNDING, Arithmetic, ComparedTexts, Control, Counters, Divergence, Sampled
from outrider.audit.statistics import compare
from outrider.audit.texts import DraftingMode, compare_text
from outrider.runtime.params import SamplingParams

SIGNIFICANCE = 1e-6
SAME = compare("first", np.zeros(200, np.int64), np.zeros(200, np.int64), SIGNIFICANCE)
DIFFER = compare("first", np.zeros(200, np.int64), np.ones(200, np.int64), SIGNIFICANCE)


def tie(at: int) -> Divergence:
    return Divergence("Once", 0.0, "model, k = 4", at, 5, 6)


def test_a_control_counts_only_if_the_test_tells_it_from_the_right_sampler() -> None:
    for fault, comparisons, excluded, detected, passed in (
        ("accepts everything", [SAME, DIFFER], 0, True, True),
        ("accepts everything", [SAME, SAME], 1, True, True),
        ("accepts everything", [SAME, SAME], 0, False, False),
        (None, [SAME, SAME], 0, False, True),
        (None, [DIFFER, SAME], 0, True, False),
        (None, [SAME, SAME], 1, True, False),
    ):
        control = Control(fault, Sampled("hot", 4, comparisons, 200, excluded))
        assert (control.detected, control.passed) == (detected, passed)


def test_near_ties_are_bounded_and_other_differences_are_not_allowed() -> None:
    texts = ComparedTexts(requests=100)
    assert texts.passed
    texts.near_ties += [tie(at) for at in range(int(100 * NEAR_TIES))] * 3  # of several modes, at the same places
    assert (texts.ties, texts.allowed, texts.passed) == (5, 5, True)
    texts.near_ties.append(tie(50))
    assert not texts.passed
    assert not ComparedTexts(requests=100, differences=[tie(1)]).passed
    few = ComparedTexts(requests=3, near_ties=[tie(1)])
    assert (few.allowed, few.passed) == (1, True)
    few.near_ties.append(tie(2))
    assert not few.passed


def test_decisions_have_to_be_checked_and_nearly_all_agree() -> None:
    assert not Arithmetic().passed
    for checked, disagreed, passed in ((10, 1, True), (10, 2, False), (round(3 / ROUNDING), 3, True), (20_000, 3, False)):
        assert Arithmetic(checked, disagreed).passed == passed
    assert Counters().passed
    assert not Counters(generations=100, unbalanced=1).passed


def test_a_difference_passes_only_where_the_plain_model_itself_would_choose_either(monkeypatch: pytest.MonkeyPatch) -> None:
    outrider: Any = SimpleNamespace(text=SimpleNamespace(encode=lambda text, chat: [1]), build=SimpleNamespace(k=[1, 2, 4]))
    asked: list[tuple[list[int], list[int], int]] = []

    def choices(_: Any, prompt: list[int], params: SamplingParams, before: list[int], sizes: list[int], most: int) -> set[int]:
        asked.append((before, sizes, most))
        return {7, 8}

    monkeypatch.setattr(texts_module, "near_choices", choices)
    texts = ComparedTexts(requests=1)
    for answer, mode in (
        ([5, 6, 7], DraftingMode(2, "model")),
        ([5, 6, 8], DraftingMode(2, "model")),
        ([5, 6, 9], DraftingMode("auto", "auto")),
        ([5, 6], DraftingMode(4, "model")),  # it ends before the plain one
        ([5, 6, 7, 8], DraftingMode(4, "model")),
    ):
        compare_text(outrider, texts, "Once", SamplingParams(), mode, [5, 6, 7], answer, sequences=3)
    assert texts.compared == 5
    assert [(each.place, each.plain, each.speculative) for each in texts.near_ties] == [(2, 7, 8)]
    assert [(each.place, each.plain, each.speculative) for each in texts.differences] == [(2, 7, 9), (2, 7, -1), (3, -1, 8)]
    assert asked == [([5, 6], [1, 2], 3), ([5, 6], [1, 2, 4], 3), ([5, 6], [1, 2, 4], 3), ([5, 6, 7], [1, 2, 4], 3)]
