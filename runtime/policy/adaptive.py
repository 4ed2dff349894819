"""The policy that chooses by the times of rounds and by acceptance.

A round of k drafted tokens emits 1 + a + ... + a^k tokens on average, where a is the probability that a drafted token is
accepted if all before it were. The policy takes the choice with the least time per token, plain decoding included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from cachetools import LRUCache

from outrider.runtime import drafters
from outrider.runtime.drafters.base import Reading
from outrider.runtime.policy.acceptance import Estimates
from outrider.runtime.policy.choice import NONE, PLAIN, Choice
from outrider.runtime.policy.costs import expected_tokens
from outrider.runtime.policy.early_stop import Confidence, EarlyStop, thresholds
from outrider.runtime.policy.learned import OWNERS, LearnedAcceptance
from outrider.runtime.policy.lengths import AnswerLengths
from outrider.runtime.policy.plans import DraftPlan, Rates, best_plan, emitted
from outrider.runtime.policy.policy import Observation, Policy, SequenceView
from outrider.runtime.policy.probes import Probes
from outrider.runtime.policy.round_costs import RoundCosts
from outrider.runtime.policy.round_times import RoundTimes, SequenceBatch
from outrider.runtime.policy.row_shares import row_shares

STICKY = 0.97  # another choice must promise at most this share of the time per token
MAX_FOR_OTHERS = 1.25  # plain rounds that a round of proposals may take, if some sequences have none
REVIEW = 4  # rounds without a drafter on the device after which steady choices are compared again, which takes time


class Steady(NamedTuple):
    """The best choice that can be made in every round, without probes and proposals from the host."""

    choice: Choice
    per_token: float  # milliseconds
    stops: bool = False  # whether its rounds may stop drafting early
    begins: Choice = PLAIN  # what its rounds set out to draft


UNKNOWN = Steady(PLAIN, 0.0)


class AdaptivePolicy(Policy):
    """Chooses by the times of rounds here, and by the recent acceptance in these requests and in earlier ones."""

    def __init__(self, costs: Callable[[int], RoundCosts], names: Sequence[str], early_stopping: bool, ragged: bool = False):
        """Choose among the drafters with these names.

        Args:
            costs: returns the costs of rounds by their number of sequences.
            early_stopping: whether the host can change a running round: that of one sequence can stop drafting early, which it
                does if draft steps are long, and in one of several, some can have proposals in place of the draft's tokens.
            ragged: whether the target's pass leaves out rows that a sequence does not need; see `Session.ragged`.
        """
        self.times = RoundTimes(costs)
        self.names = list(names)
        self.may_stop = early_stopping
        self.ragged = ragged
        self._on_device = drafters.on_device(names)
        self._on_host = [name for name in (*names, *drafters.companions()) if name not in self._on_device]
        self._learned = LearnedAcceptance(names, self.times.costs(1).acceptance)
        self._lengths: LRUCache[Hashable, AnswerLengths] = LRUCache(OWNERS)
        self._confidence = {name: Confidence() for name in self._on_device}
        self._batch = SequenceBatch((), 0, 0, 0, True, True)  # of the last round
        self._steady = UNKNOWN
        self._age = 0  # rounds since the steady choices were compared
        self._sizes = 0  # number of built k that they were compared for
        self._able: list[str] = []  # the drafters on the device that could draft when they were compared
        self._upkeep = 0.0  # milliseconds that the steady drafter needs later for what a round of proposals emits
        self._proposal_times: dict[str, list[tuple[Choice, float]]] = {}  # milliseconds of rounds, by drafter on the host
        self._probes = Probes()

    def begin(self) -> Estimates:
        return self._learned.begin()

    def lengths(self, owner: Hashable) -> AnswerLengths:
        return self._lengths.setdefault(owner, AnswerLengths())

    def choose(self, sequences: Sequence[SequenceView]) -> Choice:
        batch = SequenceBatch.of(sequences)
        if batch.new or batch.size != self._batch.size:
            self._steady, self._probes.again = UNKNOWN, NONE  # other requests do not continue this one's choice
        self._batch = batch
        if self.times.pace.overdue:
            return PLAIN
        sizes = self.sizes(batch.remaining)
        able = [name for name in self._on_device if any(name in sequence.offers for sequence in sequences)]
        self._age += 1
        if self._steady is UNKNOWN or self._age >= REVIEW or len(sizes) != self._sizes or able != self._able:
            self._able = able
            self._review(batch, sizes)
        proposed = self._proposed(batch)
        if proposed != PLAIN:
            return proposed
        # Before the first token nothing is read, so that most drafters could not be tried.
        probe = PLAIN if batch.new and batch.size == 1 else self._probes.next()
        return self._steady.begins if probe == PLAIN else probe

    def sizes(self, remaining: int) -> list[int]:
        """Return the built k that are useful while `remaining` tokens may be emitted; the last one may be larger."""
        built = self.times.costs(1).k
        return built[: sum(k < remaining - 1 for k in built) + 1] if remaining > 1 else []

    def _review(self, batch: SequenceBatch, sizes: list[int]) -> None:
        """Compare the steady choices, and price probes and proposals from the host against the best one."""
        self._age, self._sizes = 0, len(sizes)
        best, per_token = self._best(batch, sizes)
        stops = self.may_stop and batch.size == 1 and best.k > 0 and self.times.has_long_steps(best, batch)
        longer = stops and not drafters.get(best.drafter).one_pass
        self._steady = Steady(best, per_token, stops, Choice(best.drafter, sizes[-1]) if longer else best)
        self._price_probes(batch, sizes)
        self._upkeep = self.times.upkeep(best, batch)  # the drafter of later rounds has to read what a proposal's round emits
        self._proposal_times = {}

    def _best(self, batch: SequenceBatch, sizes: list[int]) -> tuple[Choice, float]:
        """Compare plain decoding and the drafters on the device, which can draft in every round; return the best choice, with
        its milliseconds per token."""
        best, least = PLAIN, self.times.round(PLAIN, batch) / batch.size
        times, plain = {PLAIN: least}, least
        for name in self._on_device:
            offered = [(each, self._options(name, each)) for each in batch.sequences if name in each.offers]
            for k in sizes if offered else ():
                choice = Choice(name, k)
                time = self.times.round(choice, batch)
                plans = [(best_plan(sequence, options, k, time / batch.size), sequence) for sequence, options in offered]
                drafting = [(plan, sequence) for plan, sequence in plans if plan.saved >= 0]
                expected = max(sum([sequence.expected for _, sequence in drafting]), 1)
                late = sum([plan.late for plan, _ in drafting]) / expected
                waiting = [plan.wait for plan, _ in drafting if plan.wait]  # one after the other
                waits = min(sum(waiting) * (len(waiting) + 1) / 2 / expected, 1)
                rates = [(plan.rate, sequence.remaining - 1, 1) for plan, sequence in drafting]
                if self.ragged and batch.size > 1:
                    _, rates, time = self._shared(choice, rates, batch, least)
                drafted = time / emitted(batch.size, rates, k)
                times[choice] = time = drafted + waits * max(plain - drafted, 0) + late
                if time < least:
                    best, least = choice, time
        previous = self._steady.choice
        if self._steady is not UNKNOWN and previous in times and least > STICKY * times[previous]:
            return previous, times[previous]
        return best, least

    def _proposed(self, batch: SequenceBatch) -> Choice:
        """Return the host drafter's choice that saves the most time in this round, compared with emitting as many tokens by
        the steady choice, with proposals beside it if it drafts; `PLAIN` if none saves any."""
        best_choice, best_saving, beside = PLAIN, 0.0, self._steady.begins
        if beside.k and batch.size > 1:
            best_saving = self._steady.per_token * sum([self._beside(beside, each)[1] for each in batch.sequences])
        most = MAX_FOR_OTHERS * self.times.round(PLAIN, batch)
        for name in self._on_host:
            if not any(name in sequence.offers for sequence in batch.sequences):
                continue
            proposals: dict[tuple[str, Hashable, int], int] = {}  # their number, by evidence and tokens that can be emitted
            for sequence in batch.sequences:
                proposer = sequence.proposer(name)
                if proposer is not None and (proposal := sequence.offers[proposer].proposal) is not None:
                    key = proposer, proposal.evidence, min(len(proposal.tokens), sequence.remaining - 1)
                    proposals[key] = proposals.get(key, 0) + 1
            if not proposals:
                continue
            rates = [(self._learned.evident(who, evidence).rate, limit, n) for (who, evidence, limit), n in proposals.items()]
            slow = most if sum(proposals.values()) < batch.size else math.inf
            if name not in self._proposal_times:
                each_k = [Choice(name, k) for k in self.sizes(batch.remaining)]
                self._proposal_times[name] = [(each, self.times.round(each, batch) + self._upkeep) for each in each_k]
            choices = self._proposal_times[name]
            if choices and self.ragged and batch.size > 1:  # what others wait limits the rows instead
                choice, rates, time = self._shared(choices[-1][0], rates, batch, self._steady.per_token)
                choices, slow = [(choice, time + self._upkeep)], math.inf
            for choice, time in choices:
                saved = emitted(batch.size, rates, choice.k) * self._steady.per_token - time
                if saved > best_saving and time <= slow:
                    best_choice, best_saving = choice, saved
        return best_choice

    def _shared(self, choice: Choice, rates: Rates, batch: SequenceBatch, price: float) -> tuple[Choice, Rates, float]:
        """Return the choice, with the k that proposals on the host need, the rates with the tokens that each sequence drafts as
        limits, and the milliseconds of a round that leaves out all other rows; they are infinite if none drafts."""
        each = [(rate, limit) for rate, limit, count in rates for _ in range(count)]
        shares = self._shares(choice, each, batch, price)
        if choice.drafter in self._on_host:
            choice = choice._replace(k=self.times.costs(1).size(max(shares, default=0)))
        time = self.times.round(choice, batch, shares) if any(shares) else math.inf
        return choice, [(rate, share, 1) for (rate, _), share in zip(each, shares, strict=True)], time

    def _shares(self, choice: Choice, rates: Sequence[tuple[float, int]], batch: SequenceBatch, price: float) -> list[int]:
        """Return how many tokens sequences draft, given the rate of each and the most tokens that it can draft."""
        limits, costs = [min(choice.k, limit) for _, limit in rates], self.times.more_rows(choice, batch)
        if choice.drafter in self._on_host and sum([limit > 0 for limit in limits]) < batch.size:
            costs[costs > (MAX_FOR_OTHERS - 1) * self.times.round(PLAIN, batch)] = math.inf
        return row_shares([rate for rate, _ in rates], limits, price, costs)

    def each(self, choice: Choice, sequences: Sequence[SequenceView]) -> list[Choice]:
        own, steady = super().each(choice, sequences), self._steady
        on_device = choice.drafter in self._on_device
        if len(sequences) == 1 or (on_device and choice.drafter != steady.choice.drafter):  # the second is a probe
            return own
        if on_device:
            own = [self._beside(choice, sequence)[0] for sequence in sequences]
        if not self.ragged:
            return own
        rates = [self._rate(each, sequence) for each, sequence in zip(own, sequences, strict=True)]
        shares = self._shares(choice, rates, self._batch, steady.per_token)
        return [each._replace(k=share) for each, share in zip(own, shares, strict=True)]

    def _beside(self, choice: Choice, sequence: SequenceView) -> tuple[Choice, float]:
        """Return how a sequence drafts in a round of a drafter on the device: by that, or by a proposal if it gains tokens. A
        proposal also costs the time in which the drafter reads it later.

        Returns:
            the choice, and how many tokens it gains.
        """
        best, gained = choice, 0.0
        proposed = [name for name, offer in sequence.offers.items() if offer.proposal is not None]
        if proposed and self.may_stop:
            read_later = self.times.upkeep(choice, self._batch) / (self._batch.size * self._steady.per_token)
            usual = self._tokens(choice, sequence) + read_later
            for other in [choice._replace(drafter=name) for name in proposed]:
                gain = self._tokens(other, sequence) - usual
                if gain > gained:
                    best, gained = other, gain
        return best, gained

    def _tokens(self, choice: Choice, sequence: SequenceView) -> float:
        rate, limit = self._rate(choice, sequence)
        return expected_tokens(rate, min(limit, choice.k))

    def _rate(self, choice: Choice, sequence: SequenceView) -> tuple[float, int]:
        """Return how often the tokens that a sequence drafts are accepted, and the most tokens that it can draft."""
        offer, limit = sequence.offers.get(choice.drafter), sequence.remaining - 1
        if offer is None:
            return 0.0, 0
        if offer.proposal is not None:
            return self._learned.evident(choice.drafter, offer.proposal.evidence).rate, min(limit, len(offer.proposal.tokens))
        share = self.times.round(choice, self._batch) / self._batch.size
        plan = best_plan(sequence, self._options(choice.drafter, sequence), choice.k, share)
        return plan.rate, limit if plan.saved >= 0 else 0

    def _price_probes(self, batch: SequenceBatch, sizes: list[int]) -> None:
        steady, probes = self._steady, []
        for name in self._on_device if sizes else ():
            if name != steady.choice.drafter and any(name in sequence.offers for sequence in batch.sequences):
                choice = Choice(name, sizes[0])
                time = self.times.round(choice, batch)
                offered = [each for each in batch.sequences if name in each.offers]
                plans = [best_plan(each, self._options(name, each), choice.k, time / batch.size) for each in offered]
                plans = [plan for plan, each in zip(plans, offered, strict=True) if plan.wait < each.expected]
                if not plans:  # it would read, and never draft
                    continue
                rate = max([self._learned.history[name, plan.reading.window].optimistic for plan in plans])
                extra = max(time - batch.size * steady.per_token, 0.0)
                probes.append((choice, extra + sum([plan.late for plan in plans]), rate))
        self._probes.price(self.times.round(steady.choice, batch), probes, drafting=steady.choice.k > 0)

    def reading(self, choice: Choice, sequence: SequenceView) -> Reading | None:
        share = self.times.round(choice, self._batch) / self._batch.size
        plan = best_plan(sequence, self._options(choice.drafter, sequence), choice.k, share)
        if choice != self._steady.choice or self._batch.size == 1:
            return plan.reading  # it was compared at this sequence's price, or is a probe, whose price was paid
        return plan.reading if plan.saved >= 0 else None

    def _options(self, name: str, sequence: SequenceView) -> list[DraftPlan]:
        """Return the ways in which a drafter can draft for a sequence. What they save is not known yet.

        A reading that was drafted from holds for the rest of the answer: where the end of a text was not enough, more of it
        seldom is, and where all of it was not, less of it is not either.
        """
        readings = sequence.offers[name].readings
        if len(readings) > 1 and sequence.acceptance[name, readings[0].window].observed:
            readings = readings[:1]
        return [self._plan(name, sequence, reading) for reading in readings]

    def _plan(self, name: str, sequence: SequenceView, reading: Reading) -> DraftPlan:
        """Return the way to draft after a reading.

        With several drafters, the best one for a request often differs from the last request's. So a drafter that can be tried
        for less than a plain round gets the benefit of the doubt.
        """
        acceptance = sequence.acceptance[name, reading.window]
        late, wait = self.times.catch_up(name, reading, sequence.length)
        if reading.window:  # summaries need the whole text, so there is no benefit of the doubt
            return DraftPlan(reading, late, wait, acceptance.cautious)
        if len(self._on_device) == 1:
            return DraftPlan(reading, late, wait, acceptance.rate)
        dear = late > self.times.round(PLAIN, self._batch) / self._batch.size
        return DraftPlan(reading, late, wait, acceptance.cautious if dear else acceptance.upper_estimate)

    def early_stop(self, choice: Choice, sequence: SequenceView) -> EarlyStop | None:
        steady = self._steady
        return self.stopping_rule(choice, sequence) if steady.stops and choice.drafter == steady.choice.drafter else None

    def stopping_rule(self, choice: Choice, sequence: SequenceView) -> EarlyStop:
        """Return the rule to stop drafting where further tokens gain less time than they cost."""
        rate = sequence.acceptance[choice.drafter, sequence.offers[choice.drafter].window].rate
        times, rows = self.times.by_drafted(choice, sequence)
        least = thresholds(times, rate, self._steady.per_token)
        return EarlyStop(rate, self._confidence[choice.drafter].rates(rate), least, rows)

    def observe(self, seen: Observation) -> None:
        name, sequences, steady = seen.choice.drafter, seen.sequences, self._steady
        done = [result for result in seen.results if result is not None]
        if self._probes.again == name:
            self._probes.again = NONE
        if name in self._confidence:
            self._age = REVIEW  # what was learned may change the comparison at once
            if len(sequences) == 1 and done:
                self._confidence[name].observe(done[0].confidences, done[0].accepted)
            if name != steady.choice.drafter and all(result.accepted == len(result.drafted) for result in done):
                tokens = sum(len(result.tokens) for result in done)
                if seen.milliseconds < tokens * steady.per_token:
                    self._probes.again = name
        for sequence, result in zip(sequences, seen.results, strict=True):
            if result is not None:
                self._learned.observe(sequence, result)
        self.times.observe(seen, self.ragged)
