"""A slot of the caches, and its content."""

from __future__ import annotations

from collections.abc import Hashable

COMPARED = 64  # tokens at a time


class Slot:
    """A slot of the caches, and the tokens whose entries it holds.

    `tokens` belong to the slot's current or last request. The first `cached` of them are in the target's cache, each at its own
    index, and only texts of the same `owner` may reuse them. The next round overwrites entries of rejected tokens.
    """

    def __init__(self, index: int):
        self.index = index
        self.finite = True  # whether all logits computed from the caches were finite
        self.empty()

    def empty(self) -> None:
        """Forget the text."""
        self.tokens: list[int] = []
        self.owner: Hashable = None
        self.cached = 0
        self.branch = 0  # length of the longest prefix in common with another text
        self.reused = 0  # length of the prefix that several requests had in common
        self.used = 0  # when the text was last used, by a counter

    def shared(self, prompt: list[int], owner: Hashable) -> int:
        """Return the length of the prompt's prefix that the caches hold for its owner."""
        return min(self.common(prompt, owner), self.cached)

    def common(self, prompt: list[int], owner: Hashable) -> int:
        """Return the length of the prefix that a prompt and the slot's text have in common; 0 for different owners."""
        limit, at, tokens = min(len(self.tokens), len(prompt)) if owner == self.owner else 0, 0, self.tokens
        while at < limit and tokens[at : at + COMPARED] == prompt[at : at + COMPARED]:
            at += COMPARED
        return next((index for index in range(at, limit) if tokens[index] != prompt[index]), limit)

    @property
    def unread(self) -> int:
        """The number of confirmed tokens that the target must read before the next round, which reads the last one."""
        return max(len(self.tokens) - 1 - self.cached, 0)
