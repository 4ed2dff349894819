"""Drafting without a model: what followed the last time that the text had the same tokens (prompt lookup)."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST, SHORTEST = 4, 2  # tokens that must agree; the longest agreement is followed


def agreement(proposed: Sequence[int], came: Sequence[int]) -> int:
    """How many tokens, from the first on, are the same."""
    shown = min(len(proposed), len(came))
    return next((at for at in range(shown) if proposed[at] != came[at]), shown)


class NgramDrafter:
    """The text so far, by its runs of tokens. Looking one up takes the same time however long the text is."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # a run of tokens -> the place after where it was last

    @property
    def length(self) -> int:
        """Tokens taken in."""
        return len(self._tokens)

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        if length < len(self._tokens):
            kept, self._tokens = self._tokens[:length], []
            self._after = {}
            self.extend(kept)

    def extend(self, tokens: list[int]) -> None:
        """Take in what comes next in the text."""
        for token in tokens:
            end = len(self._tokens)
            # Runs that end before this token, so that a text is never found at its own end.
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                self._after[tuple(self._tokens[end - length : end])] = end
            self._tokens.append(token)

    def propose(self, most: int) -> tuple[list[int], int]:
        """`most` tokens that may come next, or none where nothing agrees; and how many tokens agree."""
        for length in range(min(LONGEST, len(self._tokens)), SHORTEST - 1, -1):
            at = self._after.get(tuple(self._tokens[-length:]))
            if at is not None:
                found: list[int] = []
                while len(found) < most:  # what is proposed goes on as itself, where the text repeats itself
                    behind = at + len(found) - len(self._tokens)
                    found.append(self._tokens[behind] if behind < 0 else found[behind])
                return found, length
        return [], 0
