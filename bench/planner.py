"""Predicts the speed-up of speculation, from a few numbers, or from a bundle's measured costs and a workload's acceptance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import NamedTuple

from outrider.bench.simulator import Trace, replay
from outrider.errors import UsageError
from outrider.runtime import drafters
from outrider.runtime.policy.choice import NONE
from outrider.runtime.policy.costs import expected_tokens
from outrider.runtime.policy.policy import FixedPolicy
from outrider.runtime.policy.round_costs import RoundCosts

BETTER = 0.1  # share of rejections that a hypothetical better draft turns into acceptances
CHEAPER = 0.5  # costs of a hypothetical cheaper draft, relative to the draft's costs


@dataclass(frozen=True, slots=True)
class Account:
    """Operation counts of a text under the standard cost model."""

    target_passes: int
    draft_steps: int
    target_steps: float  # the total cost, in target passes over one row
    speedup: float  # over plain decoding, which takes one such pass, and its hops, per token


def account(
    k: int, tokens_per_pass: float, cost_ratio: float, tokens: int, pass_cost: float = 1.0, hop_cost: float = 0.0
) -> Account:
    """Return the cost of generating `tokens` tokens with k drafted tokens per round.

    Args:
        tokens_per_pass: the mean acceptance length, which is the average number of tokens that a round yields.
        cost_ratio: the number of draft steps that take as long as one target pass.
        pass_cost: the cost of a target pass over k + 1 rows, relative to a pass over one.
        hop_cost: what each pass takes to cross from stage to stage and back, relative to a pass over one row.

    Raises:
        UsageError: a number is not finite or too large, or a round would yield more than k + 1 tokens.
    """
    numbers = {"--mean-accepted": tokens_per_pass, "--cost-ratio": cost_ratio, "--pass-cost": pass_cost, "--hop-cost": hop_cost}
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise UsageError(f"{name} is {value}", "use a finite number")
    if not 1 <= tokens_per_pass <= k + 1:
        raise UsageError(
            f"a round of {k} drafted tokens cannot yield {tokens_per_pass:g}", f"use 1 to {k + 1} for --mean-accepted"
        )
    passes = math.ceil(tokens / tokens_per_pass - 1e-9)
    steps = passes * k
    equivalent, plain = passes * (pass_cost + hop_cost) + steps / cost_ratio, tokens * (1 + hop_cost)
    if not (math.isfinite(equivalent) and plain / equivalent):
        raise UsageError("these numbers overflow", "use costs of similar magnitude")
    return Account(passes, steps, equivalent, plain / equivalent)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction for one workload and one k."""

    workload: str
    drafter: str  # `NONE` in plain decoding
    k: int  # 0 in plain decoding
    mean_acceptance_length: float
    tokens_per_second: float
    speedup: float  # over plain decoding
    break_even: float | None  # acceptance rate at which it would be as fast as plain decoding; None if there is none
    cheaper_draft: float  # speed-up with a draft that costs `CHEAPER` times as much
    better_draft: float  # speed-up with a draft that turns the share `BETTER` of its rejections into acceptances


def at_rate(costs: RoundCosts, drafter: str, rate: float, end: int) -> list[Prediction]:
    """Predict plain decoding and each built k around position `end`. Assumes that a drafted token is accepted with probability
    `rate` if all tokens before it were. Excludes the time in which the drafter reads the prompt."""
    predictions, cheaper = [], costs.scaled(drafters.get(drafter).engines, CHEAPER)
    for k in (0, *costs.k):
        length, better = expected_tokens(rate, k), expected_tokens(1 - (1 - rate) * (1 - BETTER), k)
        plain = length * costs.round(NONE, 0, 0, end, True)
        times = Times(plain, costs.round(drafter, k, k, end, True), cheaper.round(drafter, k, k, end, True), 0.0)
        predictions.append(_prediction("", drafter if k else NONE, k, length, better, length, [times]))
    return predictions


def of_traces(costs: RoundCosts, drafter: str, traces: Sequence[Trace]) -> list[Prediction]:
    """Predict each workload, plain and at each built k, by replaying recorded texts. Includes the time in which the drafter
    reads the prompt."""
    if not all(drafter in trace.agrees for trace in traces):
        raise UsageError(
            f"these texts were recorded without a {drafters.get(drafter).label}",
            "record them with outrider bench, on a bundle that has one",
        )
    kind = drafters.get(drafter)
    predictions, cheaper = [], costs.scaled(kind.engines, CHEAPER)
    for workload in dict.fromkeys(trace.workload for trace in traces):
        traces_of = [trace for trace in traces if trace.workload == workload]
        tokens = sum(len(trace.tokens) for trace in traces_of)
        plain = [replay(trace, costs, FixedPolicy(NONE, 0)) for trace in traces_of]
        for k in (0, *costs.k):
            policy = FixedPolicy(drafter, k)
            texts = [
                Times(
                    without,
                    replay(trace, costs, policy),
                    replay(trace, cheaper, policy),
                    costs.catch_up(drafter, kind.unread(at, costs.k), at) if k and trace.remaining(0) > 1 else 0.0,
                )
                for trace, without in zip(traces_of, plain, strict=True)
                for at in [len(trace.prompt)]
            ]
            length, better = (tokens_per_round(costs, drafter, traces_of, k, share) for share in (0.0, BETTER))
            predictions.append(_prediction(workload, drafter if k else NONE, k, length, better, tokens, texts))
    return predictions


def tokens_per_round(costs: RoundCosts, drafter: str, traces: Sequence[Trace], k: int, flipped_share: float = 0.0) -> float:
    """Return the mean acceptance length of recorded texts over the rounds that draft: all except a round for the very last
    token of the limit, and those before the drafter has read the prompt. `flipped_share` is the share of rejections that count
    as acceptances."""
    survival = [0.0] * k
    rounds = 0
    for trace in traces:
        unread = drafters.get(drafter).unread(len(trace.prompt), [k])
        at = unread and costs.pieces(drafter, unread + 1, len(trace.prompt))
        while at < len(trace.tokens):
            accepted = trace.accepted(drafter, at, min(k, trace.remaining(at) - 1))
            rounds += trace.remaining(at) > 1
            for position in range(accepted):
                survival[position] += 1
            at += accepted + 1
    survival_rate, length, before = 1.0, 1.0, float(rounds)
    for position in range(k):
        rate = survival[position] / before if before else 0.0
        survival_rate *= 1 - (1 - rate) * (1 - flipped_share)
        length += survival_rate
        before = survival[position]
    return length


class Times(NamedTuple):
    """Milliseconds for one text."""

    plain: float  # with plain decoding
    taken: float
    cheaper: float  # with the cheaper draft
    reading: float  # the part of `taken` in which the draft reads the prompt, independent of acceptance


def _prediction(
    workload: str, drafter: str, k: int, length: float, better: float, tokens: float, texts: Sequence[Times]
) -> Prediction:
    """Return a prediction from the mean acceptance length, `length`, and that of the better draft, `better`."""

    def speedup(yielded: float) -> float:
        """Return the speed-up if a round yields `yielded` tokens."""
        return geometric_mean(each.plain / (each.reading + (each.taken - each.reading) * length / yielded) for each in texts)

    return Prediction(
        workload,
        drafter,
        k,
        length,
        1000 * tokens / sum(each.taken for each in texts),
        speedup(length),
        _break_even(k, speedup),
        geometric_mean(each.plain / each.cheaper for each in texts),
        speedup(better),
    )


def best(predictions: Sequence[Prediction]) -> dict[str, Prediction]:
    """Return the fastest prediction of each workload; plain decoding if nothing is faster."""
    return {
        workload: max((each for each in predictions if each.workload == workload), key=lambda each: each.speedup)
        for workload in dict.fromkeys(each.workload for each in predictions)
    }


def _break_even(k: int, speedup: Callable[[float], float]) -> float | None:
    """Return the acceptance rate at which rounds of k tokens are as fast as plain decoding; None if there is no such rate, and
    for plain decoding itself. `speedup` returns the speed-up at a mean acceptance length."""
    low, high = 0.0, 1.0
    if k == 0 or speedup(expected_tokens(high, k)) < 1:
        return None
    for _ in range(50):
        middle = (low + high) / 2
        (low, high) = (middle, high) if speedup(expected_tokens(middle, k)) < 1 else (low, middle)
    return high
