"""What the draft model's cache holds, and bringing it up to the confirmed tokens."""

from __future__ import annotations

import numpy as np

from outrider.engines.session import Floats, Session


def top_probability(logits: Floats, scratch: Floats) -> float:
    """Softmax's probability of the likeliest token, 1 / sum(exp(x - max x)); logits and the memory for them are [V]."""
    np.subtract(logits, logits.max(), out=scratch)
    return float(1 / np.exp(scratch, out=scratch).sum())


class ModelDrafter:
    """The draft model's cache of one slot; the drafting itself is a part of the round."""

    def __init__(self, session: Session, chunk: int, slot: int):
        """`chunk` is the longest prefill run."""
        self.session = session
        self.slot = slot
        self._chunk = chunk
        self.written: list[int] = []  # the token behind each entry of the cache, confirmed or only drafted
        self._agreed = 0  # of these, how many are known to be confirmed

    def missing(self, tokens: list[int]) -> int:
        """How many entries `catch_up` would write."""
        self._agree(tokens)
        return max(len(tokens) - 2 - self._agreed, 0)

    def rewind(self, length: int) -> None:
        """Expect another continuation of the first `length` tokens."""
        del self.written[length:]
        self._agreed = min(self._agreed, length)

    def catch_up(self, tokens: list[int], chunks: int | None = None) -> None:
        """Write what the cache lacks of all confirmed tokens but the last two, with which a round begins; or so many chunks of
        it.

        A round writes these two itself: after one in which every drafted token was accepted, the entry of the last but
        one is not in the cache yet; otherwise it is written again with what it was. So both cases are one shape.
        """
        self._agree(tokens)
        top = self.session.vocab_rows - 1  # what the draft's embedding lacks is fed as the nearest that it has
        for at in range(self._agreed, len(tokens) - 2, self._chunk)[:chunks]:
            chunk = tokens[at : min(at + self._chunk, len(tokens) - 2)]
            self.written[at:] = chunk
            self.session.write(np.array([[min(token, top) for token in chunk]]), np.array([at]), self.slot)

    def _agree(self, tokens: list[int]) -> None:
        end = min(len(self.written), len(tokens))
        while self._agreed < end and self.written[self._agreed] == tokens[self._agreed]:
            self._agreed += 1

    def wrote(self, tokens: list[int], drafted: list[int]) -> None:
        """Notice what a round wrote: the last two confirmed tokens, and the drafted ones but the last."""
        at = max(len(tokens) - 2, 0)
        self.written[at:] = [*tokens[at:], *drafted[:-1]]
