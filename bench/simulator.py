"""Recorded texts replayed against costs: what a policy would have taken, what the best fixed k, and who knows the future."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from outrider.runtime.costs import Costs
from outrider.runtime.ngram import NgramDrafter, agreement
from outrider.runtime.policy import DRAFTERS, MODEL, NGRAM, NONE, Choice, Chooser, Fixed, Policy


class Trace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One greedy answer, and what the draft would have said at each place of it."""

    workload: str
    prompt: list[int]
    tokens: list[int]
    agrees: list[bool]  # for each token: whether the draft's most likely one there is the same; empty without a draft
    confidences: list[float]  # the draft's probability of its most likely one
    most: int = 0  # tokens that were asked for, where the text might have become longer

    def __post_init__(self) -> None:
        if not self.tokens or (self.agrees and not len(self.tokens) == len(self.agrees) == len(self.confidences)):
            raise ValueError("a recorded text has no tokens, or what the draft said is not of each")

    def wanted(self, at: int) -> int:
        """Tokens that may still be emitted, as whoever makes the text sees it: where it will end is not known before."""
        return max(self.most, len(self.tokens)) - at

    def accepted(self, at: int, drafted: int) -> int:
        """Of so many tokens that the draft proposes from a place on, how many are right."""
        count = 0
        while count < min(drafted, len(self.tokens) - at) and self.agrees[at + count]:
            count += 1
        return count


def replay(trace: Trace, costs: Costs, chooser: Chooser) -> float:
    """Milliseconds that the answer would have taken after its prompt, the draft's reading of the prompt included where it
    is asked."""
    ngrams = NgramDrafter()
    ngrams.extend(trace.prompt)
    at = written = 0  # emitted tokens; tokens in the draft's cache
    total = 0.0
    while at < len(trace.tokens):
        wanted, length = trace.wanted(at), len(trace.prompt) + at
        proposed, agreeing = ngrams.propose(costs.k[-1])
        choice = chooser.choose(length, length - 2 - written, agreeing, wanted)
        drafted = min(choice.k, wanted - 1)
        size = costs.size(drafted)
        accepted = 0
        if choice.drafter == MODEL and drafted:
            total += costs.catch_up(length - 2 - written, length)
            most = drafted if chooser.stops else 1
            confidences = trace.confidences[at : at + drafted]
            drafted = next((n for n in range(1, most) if not chooser.worth(confidences[:n], drafted, length)), drafted)
            size = costs.size(drafted)
            accepted = trace.accepted(at, drafted)
            chooser.observe_confidences(trace.confidences[at : at + drafted], accepted)
            written = length + min(accepted, drafted - 1)
        elif choice.drafter == NGRAM:
            accepted = agreement(proposed[:drafted], trace.tokens[at:])
        took = costs.round(drafted if choice.drafter == MODEL else 0, size, length + size, True)
        total += took
        emitted = trace.tokens[at : at + accepted + 1]
        chooser.observe(Choice(choice.drafter, size), drafted, accepted, length, took)
        if agreeing:
            chooser.observe_lookup(agreeing, proposed, emitted)
        ngrams.extend(emitted)
        at += len(emitted)
    return total


def oracle(trace: Trace, costs: Costs, drafters: Sequence[str] = DRAFTERS) -> float:
    """The least that any policy could have taken, knowing what will be accepted; the draft reads for nothing."""
    ngrams = NgramDrafter()
    ngrams.extend(trace.prompt)
    count = len(trace.tokens)
    looked_up = []
    for token in trace.tokens:
        looked_up.append(ngrams.propose(max(costs.k))[0])
        ngrams.extend([token])
    least = [0.0] * (count + 1)
    for at in reversed(range(count)):
        end = len(trace.prompt) + at
        ways = [costs.round(0, 0, end, True) + least[at + 1]]
        for k in costs.k:
            if NGRAM in drafters and looked_up[at]:
                right = agreement(looked_up[at][:k], trace.tokens[at : count - 1])
                ways.append(costs.round(0, k, end + k, True) + least[at + right + 1])
            if MODEL in drafters and trace.agrees:
                right = trace.accepted(at, min(k, count - at - 1))
                ways.append(costs.round(right, k, end + k, True) + least[at + right + 1])
        least[at] = min(ways)
    return least[0]


def compare(traces: Sequence[Trace], costs: Costs, stops: bool = True) -> dict[str, dict[str, float]]:
    """Milliseconds of each workload's traces, by policy: each fixed k, what chooses itself, and `oracle`.

    `stops` is whether rounds can stop drafting early, as those of a CPU. What chooses itself goes through all the traces in
    their order, as a server would, and keeps what it learned.
    """
    drafters = [name for name in DRAFTERS if name == NGRAM or all(trace.agrees for trace in traces)]
    fixed: dict[str, Chooser] = {"plain": Fixed(NONE, 0)}
    policies: dict[str, Policy] = {}
    for name in drafters:
        fixed |= {f"{name}, k = {k}": Fixed(name, k) for k in costs.k}
        policies[f"{name}, k = auto"] = Policy(costs, [name], stops)
    policies["auto"] = Policy(costs, drafters, stops)
    choosers = fixed | policies
    found: dict[str, dict[str, float]] = {}
    for trace in traces:
        taken = found.setdefault(trace.workload, dict.fromkeys((*choosers, "oracle"), 0.0))
        for policy in policies.values():
            policy.start(greedy=True)
        for name, chooser in choosers.items():
            taken[name] += replay(trace, costs, chooser)
        taken["oracle"] += oracle(trace, costs, drafters)
    return found


REGRET_HEADS = (
    "workload",
    "chosen live",
    "best fixed way in hindsight",
    "knowing the future",
    "regret against the best fixed",
    "regret against the future",
)


def regrets(compared: dict[str, dict[str, float]]) -> list[tuple[str, ...]]:
    """Of what `compare` found, for each workload: the policy's speed-up, the best fixed way's, the oracle's, and what more time
    than these two the policy took."""
    found = []
    for workload, taken in compared.items():
        fixed = {name: time for name, time in taken.items() if "auto" not in name and name != "oracle"}
        best = min(fixed, key=lambda name: fixed[name])
        ratios = [f"{taken['plain'] / time:.2f}" for time in (taken["auto"], taken[best], taken["oracle"])]
        more = [f"{taken['auto'] / taken[name] - 1:+.1%}" for name in (best, "oracle")]
        found.append((workload, ratios[0], f"{ratios[1]} ({best})", ratios[2], *more))
    return found
