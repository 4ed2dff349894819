"""Drafting the tokens that a request's grammar forces."""

from __future__ import annotations

from outrider.bundle.manifest import Manifest
from outrider.runtime.drafters.base import DraftContext, Drafter, Proposal


class GrammarDrafter(Drafter):
    """Proposes the spelling of forced text. The target may spell it in other tokens."""

    name = "grammar"
    label = "grammar"
    companion = True
    prior = 0.95

    @classmethod
    def available(cls, manifest: Manifest) -> bool:
        return True

    def propose(self, context: DraftContext, k: int) -> Proposal | None:
        forced = [] if context.grammar is None else context.grammar.forced(k)
        return Proposal(forced, None) if forced else None
