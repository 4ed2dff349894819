"""Drafting without a model: propose what followed the last occurrence of the same tokens (prompt lookup)."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.bundle.manifest import Manifest
from outrider.runtime.drafters.base import DraftContext, Drafter, Proposal, Resources

LONGEST, SHORTEST = 4, 2  # tokens that must match; the longest match wins


class NgramIndex:
    """A text indexed by its n-grams. Lookups take constant time."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> the index after its last occurrence

    def __len__(self) -> int:
        return len(self._tokens)

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        if length < len(self._tokens):
            remaining, self._tokens = self._tokens[:length], []
            self._after = {}
            self.extend(remaining)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        text, after = self._tokens, self._after
        end = len(text)
        run = tuple(text[-LONGEST:])
        for token in tokens:
            # Add n-grams that end before this token, so that the end of a text does not match itself.
            for start in range(len(run) - SHORTEST + 1):
                after[run[start:]] = end
            run = (*run[1 - LONGEST :], token)
            end += 1
        text += tokens

    def propose(self, k: int) -> Proposal | None:
        """Propose `k` tokens that followed the longest match, or None; the evidence is the length of the match."""
        text = self._tokens
        for length in range(min(LONGEST, len(text)), SHORTEST - 1, -1):
            start = self._after.get(tuple(text[-length:]))
            if start is None:
                continue
            proposed = text[start : start + k]
            if len(proposed) < k:  # the text repeats what follows the match, so repeat it further
                proposed = (proposed * (k // len(proposed) + 1))[:k]
            return Proposal(proposed, length)
        return None


class NgramDrafter(Drafter):
    """Looks up the last tokens of a text earlier in the same text."""

    name = "ngram"
    label = "n-gram"

    def __init__(self, resources: Resources):
        super().__init__(resources)
        self._indexes = [NgramIndex() for _ in range(resources.slots)]

    @classmethod
    def available(cls, manifest: Manifest) -> bool:
        return True

    def truncate(self, slot: int, length: int) -> None:
        self._indexes[slot].truncate(length)

    def propose(self, context: DraftContext, k: int) -> Proposal | None:
        index = self._indexes[context.slot]
        index.extend(context.tokens[len(index) :])
        return index.propose(k)
