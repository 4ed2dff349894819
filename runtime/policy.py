"""Which drafter and how many tokens each round drafts: by what rounds cost, and what was accepted of late.

A round of k drafted tokens emits 1 + a + ... + a^k tokens, where a is the probability that one is accepted. The policy takes
what costs the least time a token, plain decoding included. Nothing of it changes what is emitted: see
`SamplingParams.rule`.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np

from outrider.runtime.costs import Costs, expected_tokens
from outrider.runtime.ngram import agreement

MODEL, NGRAM, NONE = "model", "ngram", "none"
DRAFTERS = (MODEL, NGRAM)
AUTO = "auto"

BUILT_UP_TO = 4  # the k where nothing chooses: most pairs do best there

FIRST_GUESS = {MODEL: 0.6, NGRAM: 0.5}  # of a drafted token's acceptance, before any was seen or measured
MEASURED_TOKENS = 20.0  # that what the bundle says of it counts for at first: one odd request must not overrule it
REQUEST_MEMORY, REQUEST_WEIGHT = 0.94, 3.0  # of a request's own acceptance: what a round keeps, and what history counts for
FADING = 0.985  # what a request's own keeps in a round that did not ask the draft
HISTORY_MEMORY, HISTORY_WEIGHT = 0.99, 2.0  # of all requests before it
STICKY = 0.97  # another k must promise this much of the time a token
HOPE = 1.0  # standard errors by which the acceptance of earlier requests is taken for higher than it was
PROBING = 0.02  # of the time of plain decoding: what may go to asking the draft again
USEFUL = 0.25  # acceptance below which less than that may
HORIZON = 128  # tokens, if so many are wanted, over which a draft that was left behind must earn the time to catch up
PACE_VARIANCE, PART_VARIANCE = 0.1, 0.1  # of logarithms of times over costs, before any was seen
PACE_NOISE, NOISE = 0.1, 0.04  # variance by which the pace changes from round to round, and by which rounds vary besides
PART_NOISE, KEPT = 0.0004, 0.9995  # variance by which parts change from round to round, and what they keep of themselves
ODD = 3.0  # standard deviations that a round counts for at most
SOON, STALE = 8, 100  # rounds after which plain decoding is timed again: the first time, and at most
BINS, BIN_WEIGHT = 10, 3.0  # of the draft's confidence, and how many tokens the rate over all counts as in each
MAX_REST = 7  # rounds of several requests between two that are chosen, where plain decoding has been best for as many


class Choice(NamedTuple):
    """How a round drafts."""

    drafter: str  # of DRAFTERS, or NONE
    k: int  # a built number, or 0


PLAIN = Choice(NONE, 0)


class Chooser(ABC):
    """What decides on each round of a request."""

    looks_up = False  # whether n-grams are to be looked for
    stops = False  # whether `worth` is to be asked, on a device where the host takes part in a round

    @abstractmethod
    def choose(self, length: int, missing: int, agreeing: int, wanted: int) -> Choice:
        """How the next round drafts.

        Args:
            length: confirmed tokens.
            missing: of these, how many the draft's cache lacks.
            agreeing: tokens of the text that agree with where an n-gram is proposed from; 0 is that none is.
            wanted: tokens that may still be emitted.
        """

    @abstractmethod
    def reads(self, length: int, wanted: int) -> bool:
        """Whether the draft is to read a prompt of so many tokens before the first round."""

    def worth(self, confidences: list[float], k: int, length: int) -> bool:
        """Whether a round of up to k tokens, that has drafted some of such confidences, is to draft another."""
        return True

    def observe(self, choice: Choice, drafted: int, accepted: int, length: int, milliseconds: float) -> None:  # noqa: B027
        """Take in what a round did that began at `length` confirmed tokens; `choice` has the k of its pass."""

    def observe_confidences(self, confidences: list[float], accepted: int) -> None:  # noqa: B027
        """Take in how confident the draft was of each token of a round, of which so many were accepted."""

    def observe_lookup(self, agreeing: int, proposed: list[int], emitted: list[int]) -> None:  # noqa: B027
        """Take in a proposed n-gram and what came instead, whether it was drafted or not."""


class Fixed(Chooser):
    """Always the same drafter and k; plain decoding where no n-gram is found."""

    def __init__(self, drafter: str, k: int):
        self._choice = Choice(drafter, k) if k else PLAIN
        self.looks_up = self._choice.drafter == NGRAM

    def choose(self, length: int, missing: int, agreeing: int, wanted: int) -> Choice:
        return PLAIN if self.looks_up and not agreeing else self._choice

    def reads(self, length: int, wanted: int) -> bool:
        return self._choice.drafter == MODEL


class Acceptance:
    """The probability that a drafted token is accepted if those before it were, from what was seen; the recent counts for more.

    Args:
        before: what is believed where little was seen: a rate, or what was seen elsewhere.
        memory: what the counts keep of themselves each round.
        weight: how many tokens the belief counts as.
    """

    def __init__(self, before: float | Acceptance, memory: float, weight: float):
        self._before, self._memory, self._weight = before, memory, weight
        self._seen = self._kept = 0.0

    def observe(self, drafted: int, accepted: int) -> None:
        """Take in that of so many drafted tokens the first `accepted` were accepted."""
        self._seen = self._seen * self._memory + min(drafted, accepted + 1)
        self._kept = self._kept * self._memory + accepted

    def recall(self, rate: float, tokens: float) -> None:
        """Go on as if so many tokens had been accepted at a rate; what is seen from now on pushes that out."""
        self._seen, self._kept = tokens, tokens * rate

    def fade(self) -> None:
        """Nothing was seen for a round, and what was seen is that much older."""
        self._seen, self._kept = self._seen * FADING, self._kept * FADING

    @property
    def rate(self) -> float:
        before = self._before.hopeful if isinstance(self._before, Acceptance) else self._before
        return (self._kept + self._weight * before) / (self._seen + self._weight)

    @property
    def hopeful(self) -> float:
        """What it may well be: bad luck at the start must not decide for all that follows."""
        rate = self.rate
        return min(rate + HOPE * math.sqrt(rate * (1 - rate) / (self._seen + self._weight)), 1.0)

    def tokens(self, k: int) -> float:
        """That a round of k drafted tokens is expected to emit."""
        return expected_tokens(self.rate, k)


class Timings:
    """What rounds take of late, as a share of what the costs say.

    Its logarithm is taken for a sum: the machine's pace, which all rounds share and which may change with any of them, and
    parts of the drafter, of the k and of the number of requests, which change slowly; plain decoding of one request has
    none. A Kalman filter (Kalman 1960, section 4) tells them apart. So a machine that is busy for a while makes no choice look
    dear, what is seen of one k says something of the others, and one round of plain decoding shows what many of the others
    could not.
    """

    def __init__(self) -> None:
        self._places: dict[Hashable, int] = {}  # of parts in the two below, where the pace comes first
        self._mean, self._variance = np.zeros(1), np.array([[PACE_VARIANCE]])
        self._seen: set[tuple[Choice, int]] = set()
        self._rounds = self._plain = 0  # `_plain` is the last in which plain decoding was timed

    @property
    def pace(self) -> float:
        """Of plain decoding of one request."""
        return math.exp(self._mean[0])

    @property
    def overdue(self) -> bool:
        """Whether plain decoding was not timed for so long that what runs instead is to be compared with it again; at first
        that is soon, and then twice as long each time."""
        return self._rounds - self._plain > min(self._plain + SOON, STALE)

    def ratio(self, choice: Choice, number: int = 1) -> float:
        """Of rounds of so many requests."""
        known = (self._mean[self._places[part]] for part in _parts(choice, number) if part in self._places)
        return math.exp(self._mean[0] + sum(known))

    def observe(self, ratio: float, choice: Choice, number: int = 1) -> None:
        """Take in a round of so many requests."""
        self._rounds += 1
        if (choice, number) not in self._seen:  # buffers are bound the first time
            self._seen.add((choice, number))
            return
        if choice == PLAIN:
            self._plain = self._rounds
        at = [0, *(self._place(part) for part in _parts(choice, number))]  # before the arrays are read: it lengthens them
        self._mean[1:] *= KEPT
        self._variance[1:] *= KEPT
        self._variance[:, 1:] *= KEPT
        self._variance.flat[:: len(self._mean) + 1] += PART_NOISE
        self._variance[0, 0] += PACE_NOISE
        shared = self._variance[:, at].sum(axis=1)
        spread = shared[at].sum() + NOISE
        most = ODD * math.sqrt(spread)
        surprise = math.log(max(ratio, 1e-9)) - self._mean[at].sum()
        self._mean += shared * (max(-most, min(surprise, most)) / spread)
        self._variance -= np.outer(shared, shared) / spread

    def _place(self, part: Hashable) -> int:
        if part not in self._places:
            self._places[part] = len(self._mean)
            self._mean, self._variance = np.pad(self._mean, (0, 1)), np.pad(self._variance, (0, 1))
            self._variance[-1, -1] = PART_VARIANCE
        return self._places[part]


def _parts(choice: Choice, number: int) -> list[Hashable]:
    """What the time of a round is made of, besides the pace."""
    return [*((choice.drafter, choice) if choice.k else ()), *((number,) if number > 1 else ())]


class Policy(Chooser):
    """Chooses for one request at a time; what was seen of earlier ones is where the next begins."""

    def __init__(self, costs: Costs, drafters: Sequence[str], stops: bool):
        """`drafters` are those that there are; `stops` is whether rounds can stop drafting early."""
        self.costs = costs
        self.drafters = drafters
        self.stops = stops
        self._history = {name: Acceptance(FIRST_GUESS[name], HISTORY_MEMORY, HISTORY_WEIGHT) for name in DRAFTERS}
        if costs.acceptance is not None:
            self._history[MODEL].recall(costs.acceptance, MEASURED_TOKENS)
        self._by_agreement: dict[int, Acceptance] = {}  # of n-grams, by how many tokens agree
        self._timings = Timings()
        self._saved = 0.0  # milliseconds of plain decoding since the draft was asked last
        self._confidence = [[0.0, 0.0] for _ in range(BINS)]  # tokens accepted and examined
        self.start(greedy=True)

    def start(self, greedy: bool, drafters: Sequence[str] = DRAFTERS, acceptance: Acceptance | None = None) -> None:
        """Begin a request, which allows these drafters; or go on with one, of which `acceptance` is known."""
        self._greedy = greedy
        self._allowed = [name for name in self.drafters if name in drafters]
        self.looks_up = NGRAM in self._allowed
        self._model = acceptance or self.acceptance()
        self._asking = False  # whether the last round was a probe that paid
        self._last: Choice | None = None  # but for probes and n-grams
        self._least = 0.0  # its time for a token

    def acceptance(self) -> Acceptance:
        """What is believed of the draft at the beginning of a request."""
        return Acceptance(self._history[MODEL], REQUEST_MEMORY, REQUEST_WEIGHT)

    def choose(self, length: int, missing: int, agreeing: int, wanted: int) -> Choice:
        if self._timings.overdue:
            return PLAIN
        sizes = self.sizes(wanted)
        best, least = self._steady(length, missing, wanted)
        self._last, self._least = best, least
        if self.looks_up and agreeing:
            # What a round saves: its tokens' time otherwise, less its own, and what the draft takes to read them.
            reading = self.costs.step("draft", 2, length) * self._timings.pace if best.drafter == MODEL else 0.0
            tokens = {k: self.of_ngrams(agreeing).tokens(k) for k in sizes}
            saved = {k: tokens[k] * least - self._time(Choice(NGRAM, k), length) - reading for k in sizes}
            k = max(sizes, key=lambda k: saved[k], default=0)
            if k and saved[k] > 0:
                return Choice(NGRAM, k)
        if best == PLAIN and MODEL in self._allowed and sizes:
            return self._probe(sizes[0], least, length, missing)
        if best.drafter == MODEL and self.stops:
            return Choice(MODEL, sizes[-1])  # `worth` says where it ends
        return best

    def reads(self, length: int, wanted: int) -> bool:
        return self._steady(length, length - 2, wanted)[0].drafter == MODEL

    def sizes(self, wanted: int) -> list[int]:
        """The built k that so many tokens need, the last one perhaps not whole."""
        needed = [k for k in self.costs.k if k < wanted - 1]
        return self.costs.k[: len(needed) + 1] if wanted > 1 else []

    def _steady(self, length: int, missing: int, wanted: int) -> tuple[Choice, float]:
        """What does best round after round, and its time for a token."""
        times = {PLAIN: self._time(PLAIN, length)}
        if MODEL in self._allowed:
            late = self._catch_up(missing, length) / max(min(HORIZON, wanted), 1)
            for k in self.sizes(wanted):
                choice = Choice(MODEL, k)
                times[choice] = self._time(choice, length) / self._model.tokens(k) + late
        best = min(times, key=lambda choice: times[choice])
        if self._last in times and times[best] > STICKY * times[self._last]:
            best = self._last
        return best, times[best]

    def _probe(self, k: int, plain: float, length: int, missing: int) -> Choice:
        """Plain decoding; or now and then a round that asks whether the draft has become better, for a small share of time."""
        self._saved += plain
        probe = Choice(MODEL, k)
        price = max(self._time(probe, length) - plain, 0.0) + self._catch_up(missing, length)
        if price > self.probing * self._saved and not self._asking:
            return PLAIN
        self._saved = 0.0
        return probe

    @property
    def probing(self) -> float:
        """Of the time of plain decoding: what may go to asking the draft again; less where it has been of no use."""
        return PROBING * min(self._history[MODEL].hopeful / USEFUL, 1.0)

    def _time(self, choice: Choice, length: int) -> float:
        """Of a round, by the costs and what rounds took of late."""
        return self._predicted(choice, choice.k, length) * self._timings.ratio(choice)

    def _catch_up(self, missing: int, length: int) -> float:
        """Of the draft's reading; it is not timed by itself, so what plain decoding took of late goes for it."""
        return self.costs.catch_up(missing, length) * self._timings.pace

    def _predicted(self, choice: Choice, drafted: int, length: int) -> float:
        """The time of a round by the costs alone."""
        return self.costs.round(drafted if choice.drafter == MODEL else 0, choice.k, length + choice.k, self._greedy)

    def of_ngrams(self, agreeing: int) -> Acceptance:
        """Of what n-grams propose, where so many tokens agree."""
        if agreeing not in self._by_agreement:
            self._by_agreement[agreeing] = Acceptance(self._history[NGRAM], HISTORY_MEMORY, HISTORY_WEIGHT)
        return self._by_agreement[agreeing]

    def worth(self, confidences: list[float], k: int, length: int) -> bool:
        """Whether the tokens that more drafted ones will bring, times what a token takes otherwise, are worth their cost."""
        rate = self._model.rate
        chance = rate
        for confidence in confidences:
            accepted, examined = self._confidence[_bin(confidence)]
            chance *= (accepted + BIN_WEIGHT * rate) / (examined + BIN_WEIGHT)
        drafted = len(confidences)
        costs = [self._predicted(Choice(MODEL, self.costs.size(each)), each, length) for each in range(drafted, k + 1)]
        dearer, gain = self._timings.ratio(Choice(MODEL, self.costs.size(k))), 0.0
        for cost in costs[1:]:  # one more, or two, ...: passes grow by leaps
            gain += chance * self._least
            if gain > (cost - costs[0]) * dearer:
                return True
            chance *= rate
        return False

    def observe(self, choice: Choice, drafted: int, accepted: int, length: int, milliseconds: float) -> None:
        paid = accepted == drafted and milliseconds < (drafted + 1) * self._least
        self._asking = choice.drafter == MODEL and self._last == PLAIN and paid
        if choice.drafter == MODEL:
            self.observe_acceptance(self._model, drafted, accepted)
        else:
            self._model.fade()
        self._timings.observe(milliseconds / self._predicted(choice, drafted, length), choice)

    def observe_acceptance(self, acceptance: Acceptance, drafted: int, accepted: int) -> None:
        """Take in that of so many tokens that the draft drafted for a request the first `accepted` were accepted."""
        acceptance.observe(drafted, accepted)
        self._history[MODEL].observe(drafted, accepted)

    def observe_confidences(self, confidences: list[float], accepted: int) -> None:
        for at, confidence in enumerate(confidences[: accepted + 1]):
            counts = self._confidence[_bin(confidence)]
            counts[0], counts[1] = counts[0] * HISTORY_MEMORY + (at < accepted), counts[1] * HISTORY_MEMORY + 1

    def observe_lookup(self, agreeing: int, proposed: list[int], emitted: list[int]) -> None:
        shown = min(len(proposed), len(emitted))
        right = agreement(proposed, emitted)
        if shown:
            self.of_ngrams(agreeing).observe(shown, right)
            self._history[NGRAM].observe(shown, right)


class Member(NamedTuple):
    """A request among several that run together."""

    length: int  # confirmed tokens
    missing: int  # of these, how many the draft's cache lacks
    agreeing: int  # see `Chooser.choose`
    wanted: int  # tokens that may still be emitted
    acceptance: Acceptance
    greedy: bool


class Company:
    """Chooses for several requests that run in the same passes: one drafter and one k for all.

    It weighs what a policy does, by what a round costs at their number. Checking more rows of many sequences costs more of
    what is scarce then, so speculation that pays for one request alone may not for many, and turns itself off.
    """

    def __init__(self, policy: Policy, costs: Callable[[int], Costs], drafters: Sequence[str] = DRAFTERS, k: int | None = None):
        """`policy` is what chooses for one request alone, whose history is shared; `costs` are those of so many; `k`, where
        one is given, is the only one."""
        self._policy = policy
        self._costs = functools.cache(costs)
        self._allowed = [name for name in policy.drafters if name in drafters and k != 0]
        self._k = k
        self._timings = Timings()
        self._last: Choice | None = None
        self._saved = 0.0  # milliseconds of plain decoding since the draft was asked last
        self._calm = 0  # rounds since anything but plain decoding was best
        self._rest = 0  # rounds that are plain before that is asked again

    @property
    def looks_up(self) -> bool:
        """Whether n-grams are to be looked for."""
        return NGRAM in self._allowed and not self._rest

    def choose(self, members: Sequence[Member]) -> Choice:
        """How the next round of these drafts."""
        if self._rest:  # choosing has its price, too: a few percent of the rounds of a tiny pair
            self._rest -= 1
            return PLAIN
        choice = self._weigh(members)
        self._calm = self._calm + 1 if choice == PLAIN and self._k is None else 0
        self._rest = min(self._calm, MAX_REST)
        return choice

    def _weigh(self, members: Sequence[Member]) -> Choice:
        most = max(member.wanted for member in members)
        sizes = [k for k in self._policy.sizes(most) if self._k in (None, k)]
        if self._k is None and self._timings.overdue:
            return PLAIN  # what all else is compared with is to be known
        missing = sum(member.missing for member in members)
        costs, end = self._costs(len(members)), max(member.length for member in members)
        times = {PLAIN: self._time(PLAIN, members) / len(members)}
        for k in sizes if MODEL in self._allowed else ():
            choice = Choice(MODEL, k)
            tokens = sum(member.acceptance.tokens(min(k, member.wanted - 1)) for member in members)
            late = self._catch_up(missing, end) / (len(members) * max(min(HORIZON, most), 1))
            times[choice] = self._time(choice, members) / tokens + late
        if self._k is not None:
            del times[PLAIN]
        best = min(times, key=lambda choice: times[choice], default=PLAIN)
        if self._last in times and times.get(best, 0.0) > STICKY * times[self._last]:
            best = self._last
        self._last = best
        if self.looks_up and any(member.agreeing for member in members):
            least = times.get(best, math.inf)
            reading = 0.0
            if best.drafter == MODEL:
                reading = len(members) * costs.step("draft", 2, end) * self._timings.pace
            for k in sizes:
                tokens = sum(
                    self._policy.of_ngrams(member.agreeing).tokens(min(k, member.wanted - 1)) if member.agreeing else 1.0
                    for member in members
                )
                time = (self._time(Choice(NGRAM, k), members) + reading) / tokens
                if time < least:
                    best, least = Choice(NGRAM, k), time
        drafting = [choice for choice in times if choice.drafter == MODEL]
        if best == PLAIN and drafting:
            return self._probe(min(drafting, key=lambda choice: times[choice]), members, missing)
        return best

    def _probe(self, probe: Choice, members: Sequence[Member], missing: int) -> Choice:
        """Plain decoding; or now and then a round that asks whether the draft has become better, for a small share of time."""
        plain, end = self._time(PLAIN, members), max(member.length for member in members)
        price = max(self._time(probe, members) - plain, 0.0) + self._catch_up(missing, end)
        if price > self._policy.probing / 2 * self._saved:  # half, because it asks for several requests at once
            return PLAIN
        self._saved = 0.0
        return probe

    def _time(self, choice: Choice, members: Sequence[Member]) -> float:
        """Of a round, by the costs and what rounds took of late."""
        return self._predicted(choice, members) * self._timings.ratio(choice, len(members))

    def _catch_up(self, missing: int, end: int) -> float:
        """See `Policy._catch_up`."""
        return self._costs(1).catch_up(missing, end) * self._timings.pace

    def _predicted(self, choice: Choice, members: Sequence[Member]) -> float:
        drafted = choice.k if choice.drafter == MODEL else 0
        end, greedy = max(member.length for member in members), all(member.greedy for member in members)
        return self._costs(len(members)).round(drafted, choice.k, end + choice.k, greedy)

    def observe(self, choice: Choice, members: Sequence[Member], milliseconds: float) -> None:
        """Take in what a round of these took."""
        if choice == PLAIN:
            self._saved += milliseconds
        self._timings.observe(milliseconds / self._predicted(choice, members), choice, len(members))

    def observe_text(self, drafter: str, acceptance: Acceptance, drafted: int, accepted: int) -> None:
        """Take in what a round did to one of the texts."""
        if drafter == MODEL and drafted:
            self._policy.observe_acceptance(acceptance, drafted, accepted)
        else:
            acceptance.fade()

    def observe_lookup(self, agreeing: int, proposed: list[int], emitted: list[int]) -> None:
        """See `Chooser.observe_lookup`."""
        self._policy.observe_lookup(agreeing, proposed, emitted)


def _bin(confidence: float) -> int:
    return min(int(confidence * BINS), BINS - 1)
