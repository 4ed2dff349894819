"""The policy that chooses by what rounds cost and how much is accepted.

A round of k drafted tokens emits 1 + a + ... + a^k tokens, where a is the probability that a drafted token is accepted if all
before it were. The policy takes the choice with the least time per token, plain decoding included.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from outrider.runtime import drafters
from outrider.runtime.matching import matching
from outrider.runtime.policy.acceptance import Acceptance, Confidence
from outrider.runtime.policy.choice import NONE, PLAIN, Choice, EarlyStop
from outrider.runtime.policy.costs import expected_tokens
from outrider.runtime.policy.pace import Pace
from outrider.runtime.policy.policy import Policy, SequenceView
from outrider.runtime.policy.round_costs import RoundCosts
from outrider.runtime.rounds.rounds import RoundResult

MEASURED_TOKENS = 20.0  # the weight of the acceptance in the bundle's manifest: one odd request must not overrule it
REQUEST_MEMORY, REQUEST_WEIGHT = 0.94, 3.0  # of a request's own acceptance; the weight is that of earlier requests
HISTORY_MEMORY, HISTORY_WEIGHT = 0.99, 2.0  # of all requests before it
STICKY = 0.97  # another k must promise to take no more than this share of the time per token
PROBING = 0.02  # share of the time of plain decoding that may be spent on trying a drafter again
PROBING_OTHERS = 0.005  # and of the time of a drafter that may be spent on trying another one
MOST_FOR_OTHERS = 1.25  # rounds of plain decoding that one may take to draft proposals, where not all sequences have one
USEFUL = 0.25  # acceptance below which even less may be spent
LONG_STEP = 0.4  # milliseconds of a draft step; asking whether to draft another token takes up to a tenth of this
REVIEW = 4  # rounds without a drafter on the device after which steady choices are compared again; comparing takes time, too
HORIZON = 128  # tokens, if so many are still wanted, over which catching up must pay off


class SequenceBatch(NamedTuple):
    """The sequences of a round, and what its time depends on."""

    sequences: Sequence[SequenceView]
    size: int
    end: int  # the longest text
    remaining: int  # the most tokens that one of them may still emit
    greedy: bool
    new: bool  # whether one has emitted nothing yet

    @classmethod
    def of(cls, sequences: Sequence[SequenceView]) -> SequenceBatch:
        """Return the batch of these sequences."""
        if len(sequences) == 1:
            only = sequences[0]
            return cls(sequences, 1, only.length, only.remaining, only.greedy, only.emitted == 0)
        return cls(
            sequences,
            len(sequences),
            max([sequence.length for sequence in sequences]),
            max([sequence.remaining for sequence in sequences]),
            all(sequence.greedy for sequence in sequences),
            any(sequence.emitted == 0 for sequence in sequences),
        )


class AdaptivePolicy(Policy):
    """Chooses by what rounds cost here, and by what was accepted of late in these requests and in earlier ones."""

    def __init__(self, costs: Callable[[int], RoundCosts], names: Sequence[str], early_stopping: bool):
        """Choose among the drafters with these names.

        Args:
            costs: returns the costs of rounds of so many sequences.
            early_stopping: whether rounds of one sequence can stop drafting early; they do so if draft steps are long.
        """
        self.costs = functools.cache(costs)
        self.names = list(names)
        self.may_stop = early_stopping
        kinds = {name: drafters.get(name) for name in (*names, *drafters.companions())}
        self._on_device = drafters.on_device(names)
        self._on_host = [name for name in kinds if name not in self._on_device]
        self._history = {name: Acceptance(kind.prior, HISTORY_MEMORY, HISTORY_WEIGHT) for name, kind in kinds.items()}
        for name, rate in self.costs(1).acceptance.items():
            if name in self._history:
                self._history[name].recall(rate, MEASURED_TOKENS)
        self._by_evidence: dict[tuple[str, Hashable], Acceptance] = {}
        self._confidence = {name: Confidence() for name in self._on_device}
        self.pace = Pace()
        self._usual_round = 0.0  # milliseconds of a round of the best steady choice
        self._waited: dict[str, float] = {}  # milliseconds of such rounds since a drafter was last tried
        self._probes: list[tuple[Choice, float]] = []  # what tries one after so many of them
        self._previous: Choice | None = None  # without probes and proposals from the host
        self._per_token = 0.0  # its milliseconds for a token
        self._batch = SequenceBatch((), 0, 0, 0, True, True)  # of the last round
        self._age = 0  # rounds since the steady choices were compared
        self._built = 0  # sizes that they were compared for
        self._proposal_times: dict[str, list[tuple[Choice, float]]] = {}  # milliseconds of rounds, by drafter
        self._stopping = False  # whether the last round may have stopped early
        self._probe_again = NONE  # the drafter of the last round, if that was a probe that paid off

    def begin(self) -> dict[str, Acceptance]:
        return {name: Acceptance(self._history[name], REQUEST_MEMORY, REQUEST_WEIGHT) for name in self._on_device}

    def choose(self, sequences: Sequence[SequenceView]) -> Choice:
        batch = SequenceBatch.of(sequences)
        self._stopping = False
        if batch.new or batch.size != self._batch.size:
            self._previous, self._probe_again = None, NONE  # other requests do not continue with these ones' choice
        self._batch = batch
        if self.pace.overdue:
            return PLAIN
        sizes = self.sizes(batch.remaining)
        self._age += 1
        if self._previous is None or self._age >= REVIEW or len(sizes) != self._built:
            self._review(batch, sizes)
        best = self._previous or PLAIN
        proposed = self._proposed(batch)
        if proposed != PLAIN:
            return proposed
        probe = self._probe()
        if probe != PLAIN or best == PLAIN:
            return probe
        if self.may_stop and batch.size == 1 and self._long_steps(best, batch):
            self._stopping = True
            if not self._one_pass(best):
                return Choice(best.drafter, sizes[-1])
        return best

    def _one_pass(self, choice: Choice) -> bool:
        return choice != PLAIN and drafters.get(choice.drafter).one_pass

    def _long_steps(self, choice: Choice, batch: SequenceBatch) -> bool:
        """Whether what one more token takes, a draft step or a row to verify, is so much longer than the host takes to look at
        its confidence that stopping early can pay off."""
        costs, kind = self.costs(1), drafters.get(choice.drafter)
        if self._one_pass(choice):
            most, least = (costs.verification(rows, batch.end, batch.greedy) for rows in (choice.k + 1, 1))
            step = (most - least) / choice.k
        else:
            step = kind.cost(costs, 2, batch.end, batch.greedy) - kind.cost(costs, 1, batch.end, batch.greedy)
        return step > LONG_STEP or not costs.measured

    def sizes(self, remaining: int) -> list[int]:
        """Return the built k that are needed while so many tokens may be emitted; the last one may be larger than needed."""
        built = self.costs(1).k
        return built[: sum(k < remaining - 1 for k in built) + 1] if remaining > 1 else []

    def _review(self, batch: SequenceBatch, sizes: list[int]) -> None:
        """Compare the steady choices, and note what it takes to use proposals from the host instead."""
        self._age, self._built = 0, len(sizes)
        best, self._per_token = self._steady(batch, sizes)
        self._previous = best
        self._price_probes(batch, sizes)
        upkeep = 0.0  # the drafter of the rounds to come has to read what a proposal's round emits
        if best.k:
            kind = drafters.get(best.drafter)
            upkeep = batch.size * kind.upkeep(self.costs(batch.size), batch.end) * self.pace.shared
        self._proposal_times = {
            name: [(choice, self._time(choice, batch) + upkeep) for choice in (Choice(name, k) for k in sizes)]
            for name in self._on_host
        }

    def _steady(self, batch: SequenceBatch, sizes: list[int]) -> tuple[Choice, float]:
        """Compare plain decoding and the drafters on the device, which can draft in every round.

        Returns:
            the best choice, and its milliseconds for a token.
        """
        best, least = PLAIN, self._time(PLAIN, batch) / batch.size
        times = {PLAIN: least}
        for name in self._on_device:
            offered = [(each, self._rate(name, each)) for each in batch.sequences if name in each.offers]
            behind = any(sequence.offers[name].pending for sequence, _ in offered)
            drafting, late = offered, 0.0
            for k in sizes if offered else ():
                choice = Choice(name, k)
                time = self._time(choice, batch)
                if behind:
                    drafting = [each for each in offered if self._worth_catching_up(choice, each[0], time / batch.size)]
                    horizon = sum([min(HORIZON, sequence.remaining) for sequence, _ in drafting])
                    late = self.catch_up(name, [sequence for sequence, _ in drafting]) / max(horizon, 1)
                rates = [(rate, sequence.remaining - 1, 1) for sequence, rate in drafting]
                times[choice] = time = time / _emitted(batch.size, rates, k) + late
                if time < least:
                    best, least = choice, time
        previous = self._previous
        if previous is not None and previous in times and least > STICKY * times[previous]:
            return previous, times[previous]
        return best, least

    def _proposed(self, batch: SequenceBatch) -> Choice:
        """Return the choice among proposals from the host that saves the most time in this one round, compared with emitting
        as many tokens by the best steady choice; `PLAIN` if none saves any."""
        best_choice, best_saving = PLAIN, 0.0
        most = MOST_FOR_OTHERS * self._time(PLAIN, batch)
        for name in self._on_host:
            if not any(name in sequence.offers for sequence in batch.sequences):
                continue
            proposals: dict[tuple[str, Hashable, int], int] = {}  # how many, by evidence and tokens that can be emitted
            for sequence in batch.sequences:
                proposer = sequence.proposer(name)
                if proposer is not None and (proposal := sequence.offers[proposer].proposal) is not None:
                    key = proposer, proposal.evidence, min(len(proposal.tokens), sequence.remaining - 1)
                    proposals[key] = proposals.get(key, 0) + 1
            rates = [(self.by_evidence(who, evidence).rate, limit, n) for (who, evidence, limit), n in proposals.items()]
            some = sum(proposals.values()) < batch.size
            for choice, time in self._proposal_times[name]:
                saved = _emitted(batch.size, rates, choice.k) * self._per_token - time
                if saved > best_saving and not (some and time > most):
                    best_choice, best_saving = choice, saved
        return best_choice

    def _probe(self) -> Choice:
        """Return now and then a choice that tries a drafter that is not used; else `PLAIN`."""
        for choice, price in self._probes:
            waited = self._waited[choice.drafter] = self._waited.get(choice.drafter, 0.0) + self._usual_round
            if waited > price or choice.drafter == self._probe_again:
                self._waited[choice.drafter] = 0.0
                return choice
        return PLAIN

    def _price_probes(self, batch: SequenceBatch, sizes: list[int]) -> None:
        """Note what tries each drafter that is not used, and after how many milliseconds of rounds that is worth its price."""
        best = self._previous or PLAIN
        self._usual_round, self._probes = self._time(best, batch), []
        share = PROBING_OTHERS if best.k else PROBING
        for name in self._on_device if sizes else ():
            if name != best.drafter and any(name in sequence.offers for sequence in batch.sequences):
                choice, late = Choice(name, sizes[0]), self.catch_up(name, batch.sequences)
                price = max(self._time(choice, batch) - batch.size * self._per_token, 0.0) + late
                self._probes.append((choice, price / (share * min(self._history[name].optimistic / USEFUL, 1.0))))

    def time(self, choice: Choice, sequences: Sequence[SequenceView]) -> float:
        """Return the milliseconds that a round is expected to take."""
        return self._time(choice, SequenceBatch.of(sequences))

    def _time(self, choice: Choice, batch: SequenceBatch) -> float:
        return self._predicted(choice, choice.k, batch) * self.pace.ratio(choice, batch.size)

    def catch_up(self, name: str, sequences: Sequence[SequenceView]) -> float:
        """Return the milliseconds that a drafter takes to catch up. They are not timed: plain decoding's pace goes for it."""
        time = 0.0
        for sequence in sequences:
            if name in sequence.offers and (pending := sequence.offers[name].pending):
                time += self.costs(1).catch_up(name, pending, sequence.length)
        return time * self.pace.shared

    def worth_catching_up(self, choice: Choice, sequence: SequenceView) -> bool:
        if choice != self._previous or self._batch.size == 1:
            return True  # it was compared with this sequence's price, or is a probe, whose price was paid
        return self._worth_catching_up(choice, sequence, self._time(choice, self._batch) / self._batch.size)

    def _worth_catching_up(self, choice: Choice, sequence: SequenceView, share: float) -> bool:
        """Whether drafting saves more of a sequence's rounds, each at its share of the milliseconds, than catching up takes."""
        if not sequence.offers[choice.drafter].pending:
            return True
        rate, limit = self._rate(choice.drafter, sequence), min(choice.k, sequence.remaining - 1)
        saved = min(HORIZON, sequence.remaining) * (1 - 1 / expected_tokens(rate, limit))
        return self.catch_up(choice.drafter, [sequence]) < saved * share

    def _rate(self, name: str, sequence: SequenceView) -> float:
        """Return the acceptance to compare a drafter by. Of several, the best one for a request is often not the best one for
        the last, so one that can be tried for less than a round of plain decoding gets the benefit of the doubt."""
        acceptance = sequence.acceptance[name]
        if len(self._on_device) == 1:
            return acceptance.rate
        dear = self.catch_up(name, [sequence]) > self._time(PLAIN, self._batch) / self._batch.size
        return acceptance.cautious if dear else acceptance.upper_estimate

    def _predicted(self, choice: Choice, drafted: int, batch: SequenceBatch, begun: int = 0) -> float:
        """The time of a round by the costs alone."""
        return self.costs(batch.size).round(choice.drafter, drafted, choice.k, batch.end + choice.k, batch.greedy, begun)

    def by_evidence(self, name: str, evidence: Hashable) -> Acceptance:
        """Return the acceptance of a drafter's proposals with such evidence."""
        if (name, evidence) not in self._by_evidence:
            self._by_evidence[name, evidence] = Acceptance(self._history[name], HISTORY_MEMORY, HISTORY_WEIGHT)
        return self._by_evidence[name, evidence]

    def early_stop(self, choice: Choice, sequence: SequenceView) -> EarlyStop | None:
        """Stop where the tokens that further drafting is expected to add are worth less, at the time that a token takes
        otherwise, than it costs."""
        if not self._stopping:
            return None
        costs, name, end, greedy = self.costs(1), choice.drafter, sequence.length, sequence.greedy
        rate, ratio = sequence.acceptance[name].rate, self.pace.ratio(choice)
        sizes = [costs.size(count) for count in range(min(choice.k, sequence.remaining - 1) + 1)]
        times = [ratio * costs.round(name, count, size, end + size, greedy, choice.k) for count, size in enumerate(sizes)]
        least = []
        for drafted, now in enumerate(times):
            worth, chance, lowest = 0.0, self._per_token, math.inf
            for time in times[drafted + 1 :]:  # one more token, or two, ...: the cost of a pass grows in steps
                worth += chance
                chance *= rate
                lowest = min(lowest, (time - now) / worth if worth else math.inf)
            least.append(lowest)
        return EarlyStop(rate, self._confidence[name].rates(rate), least, [size + 1 for size in sizes])

    def observe(
        self,
        choice: Choice,
        sequences: Sequence[SequenceView],
        results: Sequence[RoundResult | None],
        milliseconds: float,
    ) -> None:
        done = [result for result in results if result is not None]
        drafted = max((len(result.drafted) for result in done), default=0)
        if choice.drafter in self._confidence and len(sequences) == 1 and done:
            self._confidence[choice.drafter].observe(done[0].confidences, done[0].accepted)
        all_accepted = all(result.accepted == len(result.drafted) for result in done)
        emitted = sum(len(result.tokens) for result in done)
        if choice.drafter in self._confidence:
            self._age = REVIEW  # what was learned may change the comparison at once
        paid = all_accepted and milliseconds < emitted * self._per_token
        other = choice.drafter in self._confidence and choice.drafter != (self._previous or PLAIN).drafter
        self._probe_again = choice.drafter if other and paid else NONE
        for sequence, result in zip(sequences, results, strict=True):
            if result is not None:
                self._observe_sequence(choice, sequence, result)
        size = drafted if len(sequences) == 1 else choice.k
        begun = self._previous.k if self._stopping and self._previous else 0
        predicted = self._predicted(choice, size, SequenceBatch.of(sequences), begun)
        self.pace.observe(milliseconds / predicted, choice, len(sequences))

    def _observe_sequence(self, choice: Choice, sequence: SequenceView, result: RoundResult) -> None:
        for name, acceptance in sequence.acceptance.items():
            if name == result.drafter:
                acceptance.observe(len(result.drafted), result.accepted)
                self._history[name].observe(len(result.drafted), result.accepted)
            else:
                acceptance.fade()
        for name, offer in sequence.offers.items():  # proposals tell something whether they were drafted or not
            if offer.proposal is not None:
                shown = min(len(offer.proposal.tokens), len(result.tokens))
                right = matching(offer.proposal.tokens, result.tokens)
                self.by_evidence(name, offer.proposal.evidence).observe(shown, right)
                self._history[name].observe(shown, right)


def _emitted(size: int, rates: Sequence[tuple[float, int, int]], k: int) -> float:
    """Return the tokens that a round of so many sequences is expected to emit.

    Args:
        rates: of those that draft: their rate, the most tokens that they can draft if that is less than k, and their number.
    """
    tokens = float(size)
    for rate, limit, count in rates:
        tokens += count * (expected_tokens(rate, k if k < limit else limit) - 1)
    return tokens
