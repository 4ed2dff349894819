"""What speculation brings, predicted: from a few numbers, or from a bundle's measured costs and a workload's acceptance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.bench.results import geometric_mean
from outrider.bench.simulator import Trace, replay
from outrider.engines.errors import UsageError
from outrider.runtime.costs import Costs, expected_tokens
from outrider.runtime.policy import MODEL, NONE, Fixed

BETTER = 0.1  # of what a better draft would bring: share of the rejections that it would turn into acceptances
CHEAPER = 0.5  # of the draft's costs that a cheaper one would have


@dataclass(frozen=True, slots=True)
class Sum:
    """The textbook's account of a text."""

    target_passes: int
    draft_steps: int
    target_steps: float  # all of it, in target passes of one row
    speedup: float  # over one such pass a token


def account(k: int, tokens_per_pass: float, cost_ratio: float, tokens: int, pass_cost: float = 1.0) -> Sum:
    """So many tokens in rounds of k drafted ones.

    Args:
        tokens_per_pass: what a round yields on average: the mean acceptance length.
        cost_ratio: draft steps that take as long as one pass of the target's.
        pass_cost: of a pass over k + 1 rows, in passes over one.

    Raises:
        UsageError: a number is none, or a round would yield more than k + 1 tokens.
    """
    numbers = {"--mean-accepted": tokens_per_pass, "--cost-ratio": cost_ratio, "--pass-cost": pass_cost}
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise UsageError(f"{name} is {value}", "give a number")
    if not 1 <= tokens_per_pass <= k + 1:
        raise UsageError(
            f"a round of {k} drafted tokens cannot yield {tokens_per_pass:g}", f"give 1 to {k + 1} for --mean-accepted"
        )
    passes = math.ceil(tokens / tokens_per_pass - 1e-9)
    steps = passes * k
    equivalent = passes * pass_cost + steps / cost_ratio
    return Sum(passes, steps, equivalent, tokens / equivalent)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of a workload at one k."""

    workload: str
    k: int  # 0 is plain decoding
    mean_acceptance_length: float
    tokens_per_second: float
    speedup: float  # over plain decoding
    break_even: float | None  # acceptance rate at which it would be as fast as plain decoding; None where there is none
    cheaper_draft: float  # the speed-up with a draft of `CHEAPER` times the costs
    better_draft: float  # the speed-up with a draft that is rejected less often, by the share `BETTER`


def at_rate(costs: Costs, rate: float, end: int) -> list[Prediction]:
    """Plain decoding and each built k, where every drafted token is accepted with probability `rate` if those before it were,
    around position `end`."""
    return [
        _prediction("", k, costs, end, expected_tokens(rate, k), expected_tokens(1 - (1 - rate) * (1 - BETTER), k))
        for k in (0, *costs.k)
    ]


def of_traces(costs: Costs, traces: Sequence[Trace]) -> list[Prediction]:
    """Each workload, plain and at each built k, as the recorded texts would have gone."""
    if not all(trace.agrees for trace in traces):
        raise UsageError("these texts were recorded without a draft", "make them with outrider bench, on a bundle with a draft")
    found = []
    for workload in dict.fromkeys(trace.workload for trace in traces):
        texts = [trace for trace in traces if trace.workload == workload]
        tokens = sum(len(trace.tokens) for trace in texts)
        end = sum(len(trace.prompt) + len(trace.tokens) // 2 for trace in texts) // len(texts)
        plain = [replay(trace, costs, Fixed(NONE, 0)) for trace in texts]
        for k in (0, *costs.k):
            taken = [replay(trace, costs, Fixed(MODEL, k)) for trace in texts]
            speedup = geometric_mean(before / after for before, after in zip(plain, taken, strict=True))
            length, better = (tokens_per_round(texts, k, share) for share in (0.0, BETTER))
            usual = _prediction(workload, k, costs, end, length, better)
            beside = speedup / usual.speedup  # what texts have beside their rounds, such as prompts that the draft reads
            found.append(
                Prediction(
                    workload,
                    k,
                    length,
                    1000 * tokens / sum(taken),
                    speedup,
                    _break_even(k, length, speedup),
                    usual.cheaper_draft * beside,
                    usual.better_draft * beside,
                )
            )
    return found


def tokens_per_round(traces: Sequence[Trace], k: int, turned: float = 0.0) -> float:
    """The mean acceptance length of recorded texts, of the rounds that draft: all but one for the last token that was asked
    for. `turned` is the share of rejections that would be acceptances."""
    survival = [0.0] * k
    rounds = 0
    for trace in traces:
        at = 0
        while at < len(trace.tokens):
            accepted = trace.accepted(at, min(k, trace.wanted(at) - 1))
            rounds += trace.wanted(at) > 1
            for position in range(accepted):
                survival[position] += 1
            at += accepted + 1
    kept, length, before = 1.0, 1.0, float(rounds)
    for position in range(k):
        rate = survival[position] / before if before else 0.0
        kept *= 1 - (1 - rate) * (1 - turned)
        length += kept
        before = survival[position]
    return length


def _prediction(workload: str, k: int, costs: Costs, end: int, length: float, better: float) -> Prediction:
    plain, took = costs.round(0, 0, end, True), costs.round(k, k, end, True)
    drafting = took - costs.verification(k + 1, end, True)
    return Prediction(
        workload,
        k,
        length,
        1000 * length / took,
        length * plain / took,
        _break_even(k, length, length * plain / took),
        length * plain / (took - (1 - CHEAPER) * drafting),
        better * plain / took,
    )


def best(predictions: Sequence[Prediction]) -> dict[str, Prediction]:
    """The fastest of each workload, plain decoding where nothing is faster."""
    return {
        workload: max((each for each in predictions if each.workload == workload), key=lambda each: each.speedup)
        for workload in dict.fromkeys(each.workload for each in predictions)
    }


def _break_even(k: int, length: float, speedup: float) -> float | None:
    """The acceptance rate whose rounds of k tokens would be as fast as plain decoding, where rounds that yield `length` have
    this speed-up; None where none would, and for plain decoding itself."""
    needed, low, high = length / speedup, 0.0, 1.0
    if k == 0 or expected_tokens(high, k) < needed:
        return None
    for _ in range(50):
        middle = (low + high) / 2
        (low, high) = (middle, high) if expected_tokens(middle, k) < needed else (low, middle)
    return high
