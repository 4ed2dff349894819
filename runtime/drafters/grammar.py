"""Drafting the tokens that a request's grammar forces."""

from __future__ import annotations

from outrider.bundle.manifest import Manifest
from outrider.runtime.drafters.base import Drafter, Proposal
from outrider.runtime.grammar.matcher import Matcher


class GrammarDrafter(Drafter):
    """Proposes the spelling of forced text. The target may spell it in other tokens."""

    name = "grammar"
    label = "grammar"
    companion = True
    prior = 0.95

    @classmethod
    def available(cls, manifest: Manifest) -> bool:
        return True

    def propose(self, slot: int, tokens: list[int], k: int, grammar: Matcher | None) -> Proposal | None:
        forced = [] if grammar is None else grammar.forced(k)
        return Proposal(forced, None) if forced else None
