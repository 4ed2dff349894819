"""The draft-verify loop. No backend in it: sessions run engines, this decides what they run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outrider.engines.session import Session
from outrider.runtime.acceptance import accepted_prefix, greedy
from outrider.runtime.drafter import ModelDrafter


@dataclass(frozen=True, slots=True)
class Round:
    """What one pass of the target decided."""

    drafted: list[int]
    accepted: int  # how many of them, from the first on
    own: int  # the target's own token after those


class Loop:
    """One sequence on one pair of sessions.

    `tokens` are the confirmed ones. All but the last are in the target's cache, at their own index; whatever a rejected
    token left behind it is overwritten by the next round, because that round writes from a smaller position.
    """

    def __init__(self, target: Session, drafter: ModelDrafter, k: list[int], chunk: int):
        """`k` are the built numbers of draft tokens, `chunk` the longest prefill run."""
        self.target = target
        self.drafter = drafter
        self.tokens: list[int] = []
        self._k = sorted({0, *k})
        self._chunk = chunk

    def start(self, prompt: list[int], k: int) -> None:
        """Put the prompt into the target's cache, but for its last token, with which the first round begins; and into
        the draft's, where `k` says that one will be asked."""
        self.tokens = list(prompt)
        self.drafter.reset()
        prefill(self.target, self.tokens[:-1], self._chunk)
        if k:
            self.drafter.catch_up(self.tokens)

    @property
    def room(self) -> int:
        """Tokens that may still be emitted: one for each slot that is left, the last token's own included."""
        return self.target.capacity - len(self.tokens) + 1

    def round(self, k: int, wanted: int) -> Round:
        """Draft at most `k` tokens, verify them in one pass of the target, and confirm the accepted ones and one more.

        Never emits more than `wanted` tokens: near the end fewer are drafted, and the rows left over in the built
        shape are padding that nobody looks at.
        """
        rows, count = self._shape(k, wanted)
        drafted = self.drafter.propose(self.tokens, count) if count else []
        padding = [self.tokens[-1]] * (rows - 1 - count)
        batch = np.array([[self.tokens[-1], *drafted, *padding]], dtype=np.int64)
        logits = self.target.run(batch, np.array([len(self.tokens) - 1], dtype=np.int64))
        targets = greedy(logits[0, : count + 1])
        accepted = accepted_prefix(drafted, targets)
        self.tokens += targets[: accepted + 1]
        return Round(drafted, accepted, targets[accepted])

    def _shape(self, k: int, wanted: int) -> tuple[int, int]:
        """(rows of the target's pass, tokens to draft): the smallest built shape for as many tokens as are useful, or
        the largest that the capacity still holds."""
        slots = self.target.capacity - len(self.tokens)  # rows that fit after the last confirmed token's own
        useful = min(k, wanted - 1)
        built = [size for size in self._k if size <= min(k, slots)]
        size = next((size for size in built if size >= useful), built[-1])
        return size + 1, min(size, useful)


def prefill(session: Session, tokens: list[int], chunk: int) -> None:
    """Write the cache entries of `tokens`, from the first slot on, at most `chunk` rows a run."""
    for at in range(0, len(tokens), chunk):
        session.run(np.array([tokens[at : at + chunk]], dtype=np.int64), np.array([at], dtype=np.int64))
