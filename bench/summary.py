"""Summarizes answers into results: the figures of each mode on each prompt and workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import geometric_mean, median

from outrider.bench.results import Mode, Percentiles, PromptResult, Summary, TimedPart
from outrider.bench.simulator import Trace, replay
from outrider.runtime import drafters
from outrider.runtime.policy.choice import NONE
from outrider.runtime.policy.policy import FixedPolicy
from outrider.runtime.policy.round_costs import RoundCosts
from outrider.runtime.stats import Stats

PLAIN = Mode(drafter=NONE, k=0)
LENGTHS = (1, 32, 64, 256)  # tokens that are timed from the request, and the limit


@dataclass(frozen=True, slots=True)
class AnswerSummary:
    """One answer."""

    tokens: list[int]
    seconds: float  # after the target has read the prompt; includes the time in which the draft reads it
    arrivals: list[tuple[float, int]]  # seconds since the request, and the number of tokens that arrived then
    stats: Stats

    def until(self, tokens: int) -> float:
        """Return the seconds from the request to a number of tokens."""
        arrived = accumulate(count for _, count in self.arrivals)
        return next(at for (at, _), count in zip(self.arrivals, arrived, strict=True) if count >= tokens)

    @property
    def per_token(self) -> float:
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / max(len(self.tokens) - self.arrivals[0][1], 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between each token and the next."""
        gaps = [0.0] * (self.arrivals[0][1] - 1)
        for (before, _), (now, count) in zip(self.arrivals, self.arrivals[1:], strict=False):
            gaps += [now - before, *[0.0] * (count - 1)]
        return gaps


Answers = dict[Mode, list[list[AnswerSummary]]]
"""Answers by mode, round and prompt."""


def summarize(traces: Sequence[Trace], answers: Answers, costs: RoundCosts) -> tuple[list[PromptResult], list[Summary]]:
    """Return the results of each mode on each prompt, and on each workload."""
    plain, limit = answers[PLAIN], max(trace.remaining(0) for trace in traces)
    lengths = sorted({*(each for each in LENGTHS if each < limit), limit})
    texts = [
        _text(at, mode, trace, [each[at] for each in taken], [each[at] for each in plain], costs)
        for at, trace in enumerate(traces)
        for mode, taken in answers.items()
    ]
    summaries = []
    for workload in dict.fromkeys(trace.workload for trace in traces):
        for mode, all_taken in answers.items():
            own = [text for text in texts if (text.workload, text.mode) == (workload, mode)]
            taken = [[each[text.prompt] for text in own] for each in all_taken]
            summaries.append(_summary(own, taken, [[each[text.prompt] for text in own] for each in plain], lengths))
    return texts, summaries


def parts(traces: Sequence[Trace], answers: Answers, costs: RoundCosts) -> list[TimedPart]:
    """Return the parts of a round's time for each mode with a fixed k, in the middle of the texts."""
    middle = sum(len(each.prompt) + len(each.tokens) // 2 for each in traces) // len(traces)
    return [
        _part(mode, costs, middle, [answer for each in taken for answer in each])
        for mode, taken in answers.items()
        if isinstance(mode.k, int)
    ]


def _speedup_to(answer: AnswerSummary, plain: AnswerSummary, most: int) -> float:
    """Compare the first `most` tokens of answers. If a near-tie made one longer, both are timed up to the length of the shorter
    one."""
    tokens = min(len(answer.tokens), len(plain.tokens), most)
    return plain.until(tokens) / answer.until(tokens)


def _total(answers: list[AnswerSummary]) -> Stats:
    total = Stats()
    for answer in answers:
        total.add(answer.stats)
    return total


def _text(
    prompt: int, mode: Mode, trace: Trace, taken: list[AnswerSummary], plain: list[AnswerSummary], costs: RoundCosts
) -> PromptResult:
    total = _total(taken)
    predicted = None
    if isinstance(mode.k, int):
        without = replay(trace, costs, FixedPolicy(NONE, 0)) / (1 - _total(plain).outside_engines)
        drafted = replay(trace, costs, FixedPolicy(mode.drafter, mode.k)) / (1 - total.outside_engines)
        predicted = without / drafted
    return PromptResult(
        workload=trace.workload,
        prompt=prompt,
        mode=mode,
        tokens=len(taken[0].tokens),
        whole_speedup=[_speedup_to(a, p, len(a.tokens)) for a, p in zip(taken, plain, strict=True)],
        tokens_per_second=[len(answer.tokens) / answer.seconds for answer in taken],
        speedup=[p.seconds / a.seconds * len(a.tokens) / len(p.tokens) for a, p in zip(taken, plain, strict=True)],
        predicted_speedup=predicted,
        first_token=[1000 * answer.arrivals[0][0] for answer in taken],
        per_token=[1000 * answer.per_token for answer in taken],
        between_tokens=Percentiles.of([gap for answer in taken for gap in answer.gaps]),
        mean_acceptance_length=total.mean_acceptance_length,
        acceptance_rate=total.acceptance_rate,
        per_position_rates=total.per_position_rates,
        acceptance_histogram=total.histogram,
    )


def _summary(
    texts: list[PromptResult], taken: list[list[AnswerSummary]], plain: list[list[AnswerSummary]], lengths: list[int]
) -> Summary:
    """Summarize one mode on one workload, from its texts, its answers in each round, and those of plain decoding. Times up to
    each of `lengths` tokens."""
    everything = [answer for each in taken for answer in each]
    pairs = [pair for answers in zip(taken, plain, strict=True) for pair in zip(*answers, strict=True)]
    total = _total(everything)
    predicted = [text.predicted_speedup for text in texts if text.predicted_speedup is not None]
    return Summary(
        workload=texts[0].workload,
        mode=texts[0].mode,
        prompts=len(texts),
        tokens=sum(text.tokens for text in texts),
        whole_speedup=[geometric_mean(of_round) for of_round in zip(*(text.whole_speedup for text in texts), strict=True)],
        seconds_to={most: median(answer.until(min(most, len(answer.tokens))) for answer in everything) for most in lengths},
        speedup_to={most: geometric_mean(_speedup_to(a, p, most) for a, p in pairs) for most in lengths},
        tokens_per_second=[geometric_mean(of_round) for of_round in zip(*(t.tokens_per_second for t in texts), strict=True)],
        speedup=[geometric_mean(of_round) for of_round in zip(*(text.speedup for text in texts), strict=True)],
        predicted_speedup=geometric_mean(predicted) if predicted else None,
        first_token=Percentiles.of([answer.arrivals[0][0] for answer in everything]),
        per_token=Percentiles.of([answer.per_token for answer in everything if len(answer.arrivals) > 1]),
        between_tokens=Percentiles.of([gap for answer in everything for gap in answer.gaps]),
        mean_acceptance_length=total.mean_acceptance_length,
        acceptance_rate=total.acceptance_rate,
        per_position_rates=total.per_position_rates,
        acceptance_histogram=total.histogram,
        rounds_by_drafter=total.rounds_by_drafter,
        drafting_rounds=total.drafting_rounds,
        rounds=total.rounds,
        outside_engines=total.outside_engines,
        same_text=sum(a.tokens == p.tokens for a, p in pairs),
    )


def _part(mode: Mode, costs: RoundCosts, end: int, taken: list[AnswerSummary]) -> TimedPart:
    k = int(mode.k)
    total = _total(taken)
    engines = {
        "draft": drafters.get(mode.drafter).cost(costs, k, end, True) if k else 0.0,
        "target": costs.step("target", k + 1, end),
        "verifier": costs.sampler("greedy_verifier", k + 1),
    }
    outside = sum(engines.values()) * total.outside_engines / (1 - total.outside_engines)
    return TimedPart(mode=mode, **engines, outside_engines=outside)
