"""Drafting from earlier requests: propose what most often followed the last tokens in the texts of the same owner."""

from __future__ import annotations

from outrider.bundle.manifest import Manifest
from outrider.runtime.drafters.base import DraftContext, Drafter, Proposal, Resources


class MemoryDrafter(Drafter):
    """Looks up the last tokens of a text in the texts of its owner's earlier requests."""

    name = "memory"
    label = "memory of earlier requests"
    remembers = True

    def __init__(self, resources: Resources):
        super().__init__(resources)
        self._memory = resources.memory

    @classmethod
    def available(cls, manifest: Manifest) -> bool:
        return True

    def propose(self, context: DraftContext, k: int) -> Proposal | None:
        if self._memory is None or not context.remembers:
            return None
        tokens, matched = self._memory.propose(context.owner, context.tokens, k)
        # By owner: how often one's proposals are accepted tells nothing to others.
        return Proposal(tokens, (context.owner, matched)) if tokens else None

    def finish(self, context: DraftContext) -> None:
        if self._memory is not None and context.remembers:
            self._memory.append(context.owner, context.tokens, context.prompt)
