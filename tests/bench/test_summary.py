"""What a benchmark counts, from answers that a test has made."""

from __future__ import annotations

import pytest

from outrider.bench.results import Mode, judge
from outrider.bench.simulator import replay
from outrider.bench.summary import PLAIN, AnswerSummary, summarize
from outrider.runtime.policy.policy import FixedPolicy
from outrider.runtime.stats import Stats
from outrider.tests.runtime.policies import costs, flips, text

DRAFTED = Mode(drafter="model", k=4)


def answer(tokens: list[int], seconds: float, accepted: int = 0) -> AnswerSummary:
    stats = Stats(seconds=seconds, engine_seconds=seconds)
    stats.count("model", 4, accepted, 1, 1)
    return AnswerSummary(tokens, seconds, [(0.5, 1), (0.5 + seconds, len(tokens) - 1)], stats)


def test_a_speed_up_is_the_time_of_plain_decoding_over_the_modes() -> None:
    table, traces = costs(), [text(flips(0.7, 10)), text(flips(0.9, 10, seed=1))]
    first, second = ([*trace.tokens] for trace in traces)
    answers = {
        PLAIN: [[answer(first, 2.0), answer(second, 4.0)], [answer(first, 2.0), answer(second, 4.0)]],
        DRAFTED: [[answer(first, 1.0, 3), answer(second, 1.0, 3)], [answer(first, 4.0, 1), answer([*second[:-1], 7], 4.0, 1)]],
    }
    texts, (plain, drafted) = summarize(traces, answers, table)
    assert [(each.prompt, each.mode, each.speedup) for each in texts] == [
        (0, PLAIN, [1, 1]),
        (0, DRAFTED, [2, 0.5]),
        (1, PLAIN, [1, 1]),
        (1, DRAFTED, [4, 1]),
    ]
    assert texts[1].tokens_per_second == [10, 2.5]
    assert texts[1].whole_speedup == pytest.approx([2.5 / 1.5, 2.5 / 4.5])  # half a second to the first token
    assert drafted.whole_speedup == pytest.approx([(2.5 / 1.5 * 3) ** 0.5, (2.5 / 4.5) ** 0.5])
    assert (plain.seconds_to, drafted.seconds_to) == ({1: 0.5, 10: 3.5}, {1: 0.5, 10: 3})
    assert drafted.speedup_to == pytest.approx({1: 1, 10: (2.5 / 1.5 * 3 * 2.5 / 4.5) ** 0.25})
    assert (plain.speedup, plain.same_text, plain.predicted_speedup) == ([1, 1], 4, 1)
    assert drafted.speedup == pytest.approx([8**0.5, 0.5**0.5])
    assert (drafted.same_text, drafted.prompts, drafted.tokens) == (3, 2, 20)
    predicted = [
        replay(trace, table, FixedPolicy("none", 0)) / replay(trace, table, FixedPolicy("model", 4)) for trace in traces
    ]
    assert drafted.predicted_speedup == pytest.approx((predicted[0] * predicted[1]) ** 0.5)
    assert all(ratio > 1 for ratio in predicted)
    assert drafted.mean_acceptance_length == 3
    assert drafted.first_token.p50 == pytest.approx(500)


def test_an_answer_of_another_length_is_compared_by_the_token() -> None:
    trace = text(flips(0.7, 10))
    tokens = [*trace.tokens]
    answers = {PLAIN: [[answer(tokens, 2.0)]], DRAFTED: [[answer(tokens[:5], 1.0)]]}
    texts, (_, drafted) = summarize([trace], answers, costs())
    assert texts[1].speedup == drafted.speedup == [1]
    assert drafted.whole_speedup == pytest.approx([2.5 / 1.5])  # the fifth token came with the rest
    assert drafted.same_text == 0


def test_which_of_two_reports_is_better() -> None:
    low, high = [1.0, 2, 3, 4, 5], [6.0, 7, 8, 9, 10]
    for before, after, lower_is_better, verdict in (
        (low, high, False, "better"),
        (high, low, False, "worse"),
        (low, high, True, "worse"),
        (high, low, True, "better"),
        (low, [5.0, *high], False, "within the noise"),
        (low[:4], high, False, "fewer than 5 rounds"),
    ):
        assert judge(before, after, lower_is_better=lower_is_better) == verdict
