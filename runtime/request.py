"""One request, from its submission to its last token."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from outrider.runtime.cache.slot import Slot
from outrider.runtime.params import SamplingParams
from outrider.runtime.policy.acceptance import Acceptance, DraftedBy
from outrider.runtime.policy.lengths import AnswerLengths
from outrider.runtime.rounds.logprobs import Logprobs
from outrider.runtime.rounds.rounds import RoundResult
from outrider.runtime.rounds.sampling import SamplingState
from outrider.runtime.stats import Stats
from outrider.runtime.text.stream import Piece, TextStream


@dataclass(frozen=True, slots=True)
class Event:
    """The tokens that one round confirmed.

    `pieces` may lag behind `token_ids`: a character may need more tokens, and a possible start of a stop string is held back.
    The last event has a `finish_reason`: "stop" (end of text, a stop string or stop token), "length" (`max_new_tokens`) or
    "capacity" (the bundle's cache is full).
    """

    token_ids: tuple[int, ...]
    from_draft: tuple[bool, ...]  # for each token: whether it was drafted
    pieces: tuple[Piece, ...]
    stats: Stats  # of the whole generation so far; shared by its events
    finish_reason: str | None = None
    logprobs: tuple[Logprobs, ...] | None = None  # of each token, if the request asks for them

    @property
    def text(self) -> str:
        """The text that this event adds."""
        return "".join(text for text, _ in self.pieces)


class BegunReading(NamedTuple):
    """A text that a drafter has read in part."""

    drafter: str
    window: int  # see `Reading`


class Request:
    """A prompt, its parameters, and the answer as it grows."""

    def __init__(
        self, prompt: list[int], params: SamplingParams, sampling: SamplingState, stream: TextStream | None, capacity: int
    ):
        """Prepare a request for a cache of `capacity` positions. `LoadedBundle.request` checks the arguments.

        Without a stream the events have no text, and stop strings are ignored.
        """
        self.prompt = prompt
        self.params = params
        self.sampling = sampling
        self.tokens = list(prompt)  # the confirmed ones: prompt and answer
        self.stats = Stats(prompt_tokens=len(prompt))
        self.acceptance: dict[DraftedBy, Acceptance] = {}
        self.lengths = AnswerLengths()  # of the owner's answers
        self.reading: BegunReading | None = None  # goes on before the next rounds
        self.owner: Hashable = None  # whose share of the slots and of the queue it takes
        self.priority = 0  # among the owner's requests; the lowest is served first
        self.submitted = 0.0  # by the scheduler's clock, in seconds
        self.admitted: float | None = None
        self.slot: Slot | None = None
        self.late: float | None = None  # since when its grammar is late
        self.finish_reason: str | None = None
        # Each free position holds one token, and the last token needs none.
        self.limit = min(params.max_new_tokens, capacity - len(prompt) + 1)
        self._stream = stream

    @property
    def running(self) -> bool:
        """Whether it has a slot."""
        return self.slot is not None

    def ready(self, patient: bool = True) -> bool:
        """Return whether it can take part in a round; see `Matcher.ready`."""
        return self.sampling.grammar is None or self.sampling.grammar.ready(patient)

    @property
    def remaining(self) -> int:
        """The number of tokens that may still be emitted."""
        return self.limit - self.stats.emitted

    def take(self, result: RoundResult) -> Event:
        """Count a round, and return its event."""
        ids, pieces, reason = self._cut(result)
        accepted = min(result.accepted, len(ids))
        own = len(ids) - accepted
        rejected = own if result.accepted < len(result.drafted) else 0  # the text may have ended before the rejected token
        self.stats.count(result.drafter, len(result.drafted), accepted, rejected, own)
        if reason is None and self.remaining == 0:
            reason = "length" if self.stats.emitted == self.params.max_new_tokens else "capacity"
        if reason is not None and self._stream is not None:
            pieces += self._stream.finish()
            reason = "stop" if self._stream.stopped else reason
        self.finish_reason = reason
        from_draft = (True,) * accepted + (False,) * own
        logprobs = None if result.logprobs is None else tuple(result.logprobs[: len(ids)])
        return Event(tuple(ids), from_draft, tuple(pieces), self.stats, reason, logprobs)

    def _cut(self, result: RoundResult) -> tuple[list[int], list[Piece], str | None]:
        """Return the round's tokens up to the end of the text, their text, and "stop" if the text ends."""
        end_ids, tokens = self.sampling.end_ids, result.tokens
        if self._stream is None or not self._stream.stop:  # the usual case, faster
            end = next((index + 1 for index, token in enumerate(tokens) if token in end_ids), None) if end_ids else None
            tokens = tokens[:end]
            pieces = [] if self._stream is None else self._stream.extend(tokens, result.accepted)
            return tokens, pieces, None if end is None else "stop"
        pieces = []
        emitted, minimum, stream = self.stats.emitted, self.params.min_new_tokens, self._stream
        for index, token in enumerate(result.tokens):
            pieces += stream.push(token, from_draft=index < result.accepted, may_stop=emitted + index >= minimum)
            if stream.stopped or token in end_ids:
                return result.tokens[: index + 1], pieces, "stop"
        return result.tokens, pieces, None
