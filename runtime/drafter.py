"""The draft model's side of a round."""

from __future__ import annotations

import numpy as np

from outrider.engines.session import Session
from outrider.runtime.acceptance import greedy


def prefill(session: Session, tokens: list[int], start: int, end: int, chunk: int) -> None:
    """Write the cache entries of `tokens[start:end]`, at most `chunk` rows a run."""
    for at in range(start, end, chunk):
        session.run(np.array([tokens[at : min(at + chunk, end)]], dtype=np.int64), np.array([at], dtype=np.int64))


class ModelDrafter:
    """Proposes tokens with the draft model, one sequence at a time."""

    def __init__(self, session: Session, chunk: int, vocab_rows: int):
        """`vocab_rows` is the width of the target's logits: nothing beyond it is ever proposed."""
        self.session = session
        self._chunk = chunk
        self._width = min(vocab_rows, session.vocab_rows)
        self._cached = 0  # positions of the cache that hold confirmed tokens

    def reset(self) -> None:
        """Forget the sequence."""
        self._cached = 0

    def propose(self, tokens: list[int], count: int) -> list[int]:
        """The draft's greedy continuation of `tokens`, `count` tokens long.

        The first run takes the last two confirmed tokens: after a round in which every drafted token was accepted, the
        entry of the last but one is not in the cache yet; otherwise it is written again with what it was. So both
        cases are one shape.
        """
        known = self._clip(tokens)
        last = len(tokens) - 1
        first = max(last - 1, 0)
        prefill(self.session, known, min(self._cached, first), first, self._chunk)
        drafted: list[int] = []
        rows, position = known[first:], first
        while len(drafted) < count:
            logits = self.session.run(np.array([rows], dtype=np.int64), np.array([position], dtype=np.int64))
            drafted += greedy(logits[0, -1:, : self._width])
            position += len(rows)
            rows = drafted[-1:]
        self._cached = last + 1
        return drafted

    def _clip(self, tokens: list[int]) -> list[int]:
        """Ids that fit the draft's embedding. A target with more padding rows could emit one that does not; what the
        draft then makes of it costs acceptance and nothing else."""
        top = self.session.vocab_rows - 1
        return [min(token, top) for token in tokens]
