"""A place in the caches, and what it holds."""

from __future__ import annotations

from collections.abc import Hashable

COMPARED = 64  # tokens at a time


class Slot:
    """A place in the caches, and the tokens whose entries it holds.

    `tokens` are those of the request that has the slot or had it last; the first `cached` of them are in the target's cache, at
    their own index. No text of another `owner` goes on from them. Whatever a rejected token left behind them is overwritten by
    the next round, which writes from a smaller position.
    """

    def __init__(self, index: int):
        self.index = index
        self.finite = True  # whether all logits computed from the caches were finite so far
        self.empty()

    def empty(self) -> None:
        """Forget the text."""
        self.tokens: list[int] = []
        self.owner: Hashable = None
        self.cached = 0
        self.branch = 0  # how many tokens at the beginning another text has in common with it, at most
        self.reused = 0  # how many tokens at the beginning several requests had in common
        self.used = 0  # when the text was used last, by a count of such events

    def shared(self, prompt: list[int], owner: Hashable) -> int:
        """Return how many tokens at the beginning of a prompt the slot's caches hold for its owner."""
        return min(self.common(prompt, owner), self.cached)

    def common(self, prompt: list[int], owner: Hashable) -> int:
        """Return how many tokens at the beginning of a prompt are those of the text, read or not, if both have one owner."""
        limit, at, tokens = min(len(self.tokens), len(prompt)) if owner == self.owner else 0, 0, self.tokens
        while at < limit and tokens[at : at + COMPARED] == prompt[at : at + COMPARED]:
            at += COMPARED
        return next((index for index in range(at, limit) if tokens[index] != prompt[index]), limit)

    @property
    def unread(self) -> int:
        """The number of confirmed tokens that the target has yet to read; the last one is left to the next round."""
        return max(len(self.tokens) - 1 - self.cached, 0)
