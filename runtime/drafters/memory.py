"""Drafting from earlier requests: propose what most often followed the last tokens in the texts of the same owner."""

from __future__ import annotations

from outrider.bundle.manifest import Manifest
from outrider.runtime.drafters.base import Context, Drafter, Proposal, Resources


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

    def propose(self, context: Context, k: int) -> Proposal | None:
        store = self._memory.store(context.owner) if self._memory is not None and context.memory else None
        tokens, evidence = ([], 0) if store is None else store.propose(context.tokens, k)
        return Proposal(tokens, evidence) if tokens else None

    def finish(self, context: Context) -> None:
        store = self._memory.store(context.owner, begin=True) if self._memory is not None and context.memory else None
        if store is not None:
            store.append(context.tokens)
