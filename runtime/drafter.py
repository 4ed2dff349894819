"""The draft model's side of a round."""

from __future__ import annotations

import numpy as np

from outrider.engines.session import Floats, Session
from outrider.runtime.sampler import Request, TokenSampler


class ModelDrafter:
    """Proposes tokens with the draft model, one sequence at a time."""

    def __init__(self, session: Session, chunk: int):
        """`chunk` is the longest prefill run."""
        self.session = session
        self._chunk = chunk
        self.written: list[int] = []  # the token behind each entry of the cache, confirmed or only drafted
        self._agreed = 0  # of these, how many are known to be confirmed

    def rewind(self, length: int) -> None:
        """Expect another continuation of the first `length` tokens."""
        del self.written[length:]
        self._agreed = min(self._agreed, length)

    def catch_up(self, tokens: list[int]) -> None:
        """Write whatever the cache lacks of all confirmed tokens but the last two, with which `propose` begins."""
        end = min(len(self.written), len(tokens))
        while self._agreed < end and self.written[self._agreed] == tokens[self._agreed]:
            self._agreed += 1
        for at in range(self._agreed, len(tokens) - 2, self._chunk):
            self._run(tokens[at : min(at + self._chunk, len(tokens) - 2)], at)

    def propose(self, tokens: list[int], count: int, sampler: TokenSampler, request: Request) -> list[int]:
        """The draft's continuation of `tokens`, `count` tokens long, drawn by `sampler`.

        The first run takes the last two confirmed tokens: after a round in which every drafted token was accepted, the
        entry of the last but one is not in the cache yet; otherwise it is written again with what it was. So both
        cases are one shape.
        """
        self.catch_up(tokens)
        drafted: list[int] = []
        position = max(len(tokens) - 2, 0)
        rows = tokens[position:]
        while len(drafted) < count:
            logits = self._run(rows, position)
            drafted.append(sampler.draft(request, logits[:, -1:], len(drafted)))
            position += len(rows)
            rows = drafted[-1:]
        return drafted

    def _run(self, tokens: list[int], position: int) -> Floats:
        """One run, remembered in `written`.

        A target with more padding rows than the draft could emit a token that the draft's embedding lacks; it is fed
        the nearest it has, and what it makes of that costs acceptance and nothing else.
        """
        top = self.session.vocab_rows - 1
        ids = np.array([[min(token, top) for token in tokens]], dtype=np.int64)
        self.written[position:] = tokens
        return self.session.run(ids, np.array([position], dtype=np.int64))
