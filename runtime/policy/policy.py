"""The interface of policies, which choose the drafter and k of each round. The emitted tokens do not depend on the choice; see
`SamplingParams.rule`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from outrider.runtime import drafters
from outrider.runtime.drafters.base import Proposal, Reading
from outrider.runtime.policy.acceptance import Acceptance, DraftedBy
from outrider.runtime.policy.choice import NONE, PLAIN, Choice
from outrider.runtime.policy.early_stop import EarlyStop
from outrider.runtime.policy.lengths import AnswerLengths
from outrider.runtime.rounds.rounds import RoundResult

REPAID = 0.5  # of an answer's expected length


class Offer(NamedTuple):
    """What a drafter can do for a sequence in the next round."""

    readings: Sequence[Reading]  # what it can read first; see `Drafter.readings`
    proposal: Proposal | None  # None if it drafts on the device

    @property
    def window(self) -> int:
        """How many of the last tokens its cache began with; see `Reading`."""
        return self.readings[0].window


class SequenceView(NamedTuple):
    """What a policy sees of a sequence."""

    length: int  # confirmed tokens
    emitted: int
    remaining: int  # tokens that may still be emitted
    greedy: bool
    offers: Mapping[str, Offer]  # of the drafters that can draft now
    acceptance: Mapping[DraftedBy, Acceptance]  # in this request, of drafters on the device
    lengths: AnswerLengths = AnswerLengths()  # of the owner's answers; never changed here

    @property
    def expected(self) -> float:
        """The number of tokens within which a drafter's reading has to pay. It is the share `REPAID` of the rest of the answer
        as estimated, because an answer that ends early loses more than a long one gains."""
        return REPAID * self.lengths.expected(self.emitted, self.remaining)

    def proposer(self, preferred: str) -> str | None:
        """Return the drafter whose proposal the sequence uses in a round of proposals: the preferred one or, because the pass
        has room for it, another one."""
        names = [name for name, offer in self.offers.items() if offer.proposal is not None]
        return preferred if preferred in names else next(iter(names), None)


class Observation(NamedTuple):
    """A round that was run."""

    choice: Choice  # its k is that of the pass
    sequences: Sequence[SequenceView]
    results: Sequence[RoundResult | None]  # one for each sequence; None if it failed
    milliseconds: float  # without catching up
    begun: int = 0  # tokens that it set out to draft, if it could stop early


class Policy(ABC):
    """Chooses for each round of one or several sequences."""

    names: list[str]  # the drafters to choose from

    def begin(self) -> dict[DraftedBy, Acceptance]:
        """Return a new request's estimates of acceptance."""
        return {}

    def lengths(self, owner: Hashable) -> AnswerLengths:
        """Return the lengths of an owner's answers, to estimate a new one's and to note it at its end."""
        return AnswerLengths()

    @abstractmethod
    def choose(self, sequences: Sequence[SequenceView]) -> Choice:
        """Return how the next round drafts."""

    def each(self, choice: Choice, sequences: Sequence[SequenceView]) -> list[Choice]:
        """Return how each sequence drafts in the chosen round: its drafter, and the most tokens. The default is all that the
        pass has room for."""
        if drafters.on_device([choice.drafter]):
            return [choice] * len(sequences)
        return [choice._replace(drafter=sequence.proposer(choice.drafter) or NONE) for sequence in sequences]

    def reading(self, choice: Choice, sequence: SequenceView) -> Reading | None:
        """Return what the chosen drafter, which is on the device, should read of a sequence to draft for it as well; None if
        that does not pay. The default is the whole text."""
        return next(reading for reading in sequence.offers[choice.drafter].readings if not reading.window)

    def early_stop(self, choice: Choice, sequence: SequenceView) -> EarlyStop | None:
        """Return when the chosen round of one sequence stops drafting; None if it does not stop early."""
        return None

    def observe(self, seen: Observation) -> None:  # noqa: B027
        """Learn from a round."""


class FixedPolicy(Policy):
    """Always uses the same drafter and k, or plain decoding.

    A companion's proposals are free. They replace the drafter if all sequences have some, or if it cannot draft for any.
    """

    def __init__(self, drafter: str, k: int):
        self.names = [drafter] if k else []
        self._companions = drafters.companions() if k else []
        self._k = k

    def choose(self, sequences: Sequence[SequenceView]) -> Choice:
        offers = [sequence.offers for sequence in sequences]
        everywhere = (name for name in self._companions if all(name in each for each in offers))
        anywhere = (name for name in (*self.names, *self._companions) if any(name in each for each in offers))
        name = next(chain(everywhere, anywhere), None)
        return PLAIN if name is None else Choice(name, self._k)
