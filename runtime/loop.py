"""The draft-verify loop. No backend in it: rounds run engines, this decides which rounds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outrider.engines.session import Session
from outrider.runtime.drafter import ModelDrafter
from outrider.runtime.request import Logprobs, Request
from outrider.runtime.rounds import Rounds


@dataclass(frozen=True, slots=True)
class Round:
    """What one pass of the target decided."""

    drafted: int  # tokens that it checked
    tokens: list[int]  # the accepted ones, and one of the target's own
    logprobs: list[Logprobs] | None  # of each, where the request asks for them


class Loop:
    """One sequence at a time on one pair of sessions.

    `tokens` are the confirmed ones. All but the last are in the target's cache, at their own index; whatever a rejected
    token left behind it is overwritten by the next round, because that round writes from a smaller position.
    """

    tokens: list[int]
    request: Request

    def __init__(self, rounds: Rounds, k: list[int], chunk: int):
        """`k` are the built numbers of draft tokens, `chunk` the longest prefill run."""
        self.rounds = rounds
        self.target = rounds.launches.sessions["target"]
        self.drafter = ModelDrafter(rounds.launches.sessions["draft"], chunk)
        self._k = sorted({0, *k})
        self._chunk = chunk

    def start(self, prompt: list[int], request: Request, k: int) -> None:
        """Put the prompt into the target's cache, but for its last token, with which the first round begins; and into
        the draft's, where `k` says that one will be asked."""
        self.drafter.rewind(0)
        self.restart(prompt, request)
        prefill(self.target, prompt[:-1], self._chunk)
        if k:
            self.drafter.catch_up(prompt)

    def restart(self, prompt: list[int], request: Request) -> None:
        """Answer once more the prompt that the caches hold."""
        self.drafter.rewind(len(prompt))
        self.tokens = list(prompt)
        self.request = request

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
        if count:
            self.drafter.catch_up(self.tokens)
        drafted, tokens, logprobs = self.rounds.run(self.tokens, self.request, count, rows)
        if count:
            self.drafter.wrote(self.tokens, drafted)
        self.tokens += tokens
        self.request.advance(tokens)
        return Round(count, tokens, logprobs)

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
        session.write(np.array([tokens[at : at + chunk]], dtype=np.int64), np.array([at], dtype=np.int64))
