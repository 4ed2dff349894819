"""What decides on the drafter and the number of draft tokens of each round. What is emitted does not depend on it; see
`SamplingParams.rule`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from outrider.runtime import drafters
from outrider.runtime.drafters.base import Proposal
from outrider.runtime.policy.acceptance import Acceptance
from outrider.runtime.policy.choice import PLAIN, Choice, EarlyStop
from outrider.runtime.rounds.rounds import RoundResult


class Offer(NamedTuple):
    """What a drafter can do for a sequence in the next round."""

    pending: int  # confirmed tokens that it has to process first
    proposal: Proposal | None  # None where it drafts on the device


class SequenceView(NamedTuple):
    """What a policy sees of a sequence."""

    length: int  # confirmed tokens
    emitted: int
    remaining: int  # tokens that may still be emitted
    greedy: bool
    offers: Mapping[str, Offer]  # by drafter; those that cannot draft now are missing
    acceptance: Mapping[str, Acceptance]  # of the drafters that draft on the device, in this request

    def proposer(self, preferred: str) -> str | None:
        """Return whose proposal the sequence takes in a round of proposals from the host: the preferred drafter's, or else
        another's, since the pass has room for it."""
        names = [name for name, offer in self.offers.items() if offer.proposal is not None]
        return preferred if preferred in names else next(iter(names), None)


class Policy(ABC):
    """Decides on each round of one or several sequences that share its passes."""

    names: list[str]  # the drafters that it may choose

    def begin(self) -> dict[str, Acceptance]:
        """Return the estimates of acceptance, by drafter, that a new request starts with."""
        return {}

    @abstractmethod
    def choose(self, sequences: Sequence[SequenceView]) -> Choice:
        """Return how the next round drafts."""

    def worth_catching_up(self, choice: Choice, sequence: SequenceView) -> bool:
        """Return whether the chosen drafter is to process what is pending of a sequence, to draft for that one, too."""
        return True

    def early_stop(self, choice: Choice, sequence: SequenceView) -> EarlyStop | None:
        """Return where the round that was chosen last, of one sequence, stops drafting; None is at its end."""
        return None

    def observe(  # noqa: B027
        self,
        choice: Choice,
        sequences: Sequence[SequenceView],
        results: Sequence[RoundResult | None],
        milliseconds: float,
    ) -> None:
        """Learn from a round.

        Args:
            choice: what was run; its k is that of the pass.
            results: one for each sequence; None where it failed.
            milliseconds: the time that the round took, without catching up.
        """


class FixedPolicy(Policy):
    """Always uses the same drafter and k; a companion's proposals, which cost no drafting, where all sequences have some or
    that drafter offers nothing; or plain decoding."""

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
