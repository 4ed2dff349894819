"""What is known of how often drafted tokens are accepted: in a request, in earlier ones, and by the evidence of proposals."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from cachetools import LRUCache

from outrider.runtime import drafters
from outrider.runtime.matching import matching
from outrider.runtime.policy.acceptance import Acceptance, DraftedBy, Estimates
from outrider.runtime.policy.policy import SequenceView
from outrider.runtime.rounds.rounds import RoundResult

MEASURED_TOKENS = 20.0  # the weight of the manifest's acceptance: one unusual request must not overrule it
PARTIAL, PARTIAL_TOKENS = 0.85, 10.0  # the share of it to assume if the draft reads only the end of a text, and its weight
REQUEST_MEMORY, REQUEST_WEIGHT = 0.94, 3.0  # of a request's acceptance, and the weight of earlier requests in it
HISTORY_MEMORY, HISTORY_WEIGHT = 0.99, 2.0  # of earlier requests' acceptance
OWNERS = 1024  # whose answers are learned from


class LearnedAcceptance:
    """Estimates of acceptance that a policy keeps. `history` has those of earlier requests."""

    def __init__(self, names: Sequence[str], measured: Mapping[str, float]):
        """Learn about the drafters with these names, beginning with the acceptance that was measured with the bundle."""
        self.history = Estimates(self._first_estimate)
        self._on_device, self._measured = drafters.on_device(names), measured
        self._by_evidence: LRUCache[tuple[str, Hashable], Acceptance] = LRUCache(4 * OWNERS)

    def _first_estimate(self, drafted_by: DraftedBy) -> Acceptance:
        """Return the estimate for requests before any was seen."""
        name, window = drafted_by
        prior, measured = drafters.get(name).prior, self._measured.get(name)
        estimate = Acceptance(prior, HISTORY_MEMORY, HISTORY_WEIGHT)
        if window:
            estimate.recall(PARTIAL * (prior if measured is None else measured), PARTIAL_TOKENS)
        elif measured is not None:
            estimate.recall(measured, MEASURED_TOKENS)
        return estimate

    def begin(self) -> Estimates:
        """Return a new request's estimates."""
        return Estimates(lambda drafted_by: Acceptance(self.history[drafted_by], REQUEST_MEMORY, REQUEST_WEIGHT))

    def evident(self, name: str, evidence: Hashable) -> Acceptance:
        """Return the acceptance of a drafter's proposals with this evidence."""
        if (name, evidence) not in self._by_evidence:
            self._by_evidence[name, evidence] = Acceptance(self.history[name, 0], HISTORY_MEMORY, HISTORY_WEIGHT)
        return self._by_evidence[name, evidence]

    def observe(self, sequence: SequenceView, result: RoundResult) -> None:
        """Learn from a sequence's round."""
        offer = sequence.offers.get(result.drafter)
        used = result.drafter, 0 if offer is None else offer.window
        for drafted_by, acceptance in sequence.acceptance.items():
            if drafted_by != used:
                acceptance.fade()
        if used[0] in self._on_device:
            for estimate in (sequence.acceptance[used], self.history[used]):
                estimate.observe(len(result.drafted), result.accepted)
        for name, offer in sequence.offers.items():  # proposals can be compared even if they were not drafted
            if offer.proposal is not None:
                shown = min(len(offer.proposal.tokens), len(result.tokens))
                right = matching(offer.proposal.tokens, result.tokens)
                self.evident(name, offer.proposal.evidence).observe(shown, right)
                self.history[name, 0].observe(shown, right)
