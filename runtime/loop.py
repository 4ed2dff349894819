"""The draft-verify loop. No backend in it: rounds run engines, this decides which rounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from outrider.engines.session import Session
from outrider.runtime.drafter import ModelDrafter
from outrider.runtime.ngram import NgramDrafter
from outrider.runtime.policy import MODEL, NGRAM, PLAIN, Choice, Chooser
from outrider.runtime.request import Logprobs, Request
from outrider.runtime.rounds import Rounds


@dataclass(frozen=True, slots=True)
class Round:
    """What one pass of the target decided."""

    drafter: str  # of `policy.DRAFTERS`, or `policy.NONE`
    drafted: int  # tokens that it checked
    tokens: list[int]  # the accepted ones, and one of the target's own
    logprobs: list[Logprobs] | None  # of each, where the request asks for them


class Loop:
    """One sequence at a time on the sessions of a target and, where there is one, a draft.

    `tokens` are the confirmed ones. All but the last are in the target's cache, at their own index; whatever a rejected
    token left behind it is overwritten by the next round, because that round writes from a smaller position.
    """

    tokens: list[int]
    request: Request
    chooser: Chooser

    def __init__(self, rounds: Rounds, k: list[int], chunk: int, clock: Callable[[], float] = time.perf_counter):
        """`k` are the built numbers of draft tokens, `chunk` the longest prefill run, `clock` tells seconds."""
        self.rounds = rounds
        sessions = rounds.launches.sessions
        self.target = sessions["target"]
        self.drafter = ModelDrafter(sessions["draft"], chunk) if "draft" in sessions else None
        self.ngrams = NgramDrafter()
        self._k = sorted({0, *k})
        self._chunk = chunk
        self._clock = clock

    def start(self, prompt: list[int], request: Request, chooser: Chooser, wanted: int) -> float:
        """Put the prompt into the target's cache, but for its last token, with which the first round begins; and into
        the draft's, where the chooser will want it for so many wanted tokens.

        Returns:
            the seconds that the draft's took.
        """
        if self.drafter is not None:
            self.drafter.rewind(0)
        self.ngrams.rewind(0)
        self.restart(prompt, request, chooser)
        prefill(self.target, prompt[:-1], self._chunk)
        self.target.device.synchronize()
        if self.drafter is None or not chooser.reads(len(prompt), wanted):
            return 0.0
        started = self._clock()
        self.drafter.catch_up(prompt)
        self.target.device.synchronize()
        return self._clock() - started

    def restart(self, prompt: list[int], request: Request, chooser: Chooser) -> None:
        """Answer once more the prompt that the caches hold."""
        if self.drafter is not None:
            self.drafter.rewind(len(prompt))
        self.ngrams.rewind(len(prompt))
        self.tokens = list(prompt)
        self.request = request
        self.chooser = chooser

    @property
    def room(self) -> int:
        """Tokens that may still be emitted: one for each slot that is left, the last token's own included."""
        return self.target.capacity - len(self.tokens) + 1

    def round(self, wanted: int) -> Round:
        """Draft tokens as the chooser says, verify them in one pass of the target, and confirm the accepted ones and one more.

        Never emits more than `wanted` tokens: near the end fewer are drafted, and the rows left over in the built
        shape are padding that nobody looks at.
        """
        length, chooser = len(self.tokens), self.chooser
        proposed, agreeing = list[int](), 0
        if chooser.looks_up:
            self.ngrams.extend(self.tokens[self.ngrams.length :])
            proposed, agreeing = self.ngrams.propose(self._k[-1])
        missing = self.drafter.missing(self.tokens) if self.drafter is not None else 0
        choice = chooser.choose(length, missing, agreeing, wanted)
        rows, count = self._shape(choice.k, wanted)
        confidences: list[float] = []
        given, shorter = None, None
        if choice.drafter == NGRAM:
            given = proposed[:count]
        elif choice.drafter == MODEL and count:
            assert self.drafter is not None
            if missing:
                self.drafter.catch_up(self.tokens)
                self.target.device.synchronize()  # it is not of the round, whose time is taken
            if chooser.stops:

                def shorter(drafted: int) -> int | None:
                    confidences.append(self.rounds.launches.confidence(drafted - 1, self.request.greedy))
                    if chooser.worth(confidences, count, length):
                        return None
                    return self._size(drafted) + 1

        started = self._clock()
        drafted, tokens, logprobs = self.rounds.run(self.tokens, self.request, count, rows, given, shorter)
        took = 1000 * (self._clock() - started)
        accepted = len(tokens) - 1
        if choice.drafter == MODEL and drafted:
            assert self.drafter is not None
            self.drafter.wrote(self.tokens, drafted)
            chooser.observe_confidences(confidences, accepted)
        done = Choice(choice.drafter, self._size(len(drafted))) if drafted else PLAIN
        chooser.observe(done, len(drafted), accepted, length, took)
        if agreeing:
            chooser.observe_lookup(agreeing, proposed, tokens)
        self.tokens += tokens
        self.request.advance(tokens)
        return Round(done.drafter, len(drafted), tokens, logprobs)

    def _size(self, drafted: int) -> int:
        """The built k that so many drafted tokens need."""
        return next(size for size in self._k if size >= drafted)

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
