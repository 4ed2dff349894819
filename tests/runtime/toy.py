"""A drafter in one file: it proposes the last token k times."""

from __future__ import annotations

from outrider.bundle.manifest import Manifest
from outrider.runtime.drafters.base import DraftContext, Drafter, Proposal


class Repeat(Drafter):
    """Guesses that the text continues with the same token."""

    name = "repeat"
    label = "repetition"

    @classmethod
    def available(cls, manifest: Manifest) -> bool:
        return True

    def propose(self, context: DraftContext, k: int) -> Proposal | None:
        return Proposal(context.tokens[-1:] * k, None)
