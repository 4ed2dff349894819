"""`Outrider.load(bundle).generate(prompt)`: confirmed tokens as events."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

from outrider.backends.open import open_bundle, open_engines
from outrider.engines.session import Engines
from outrider.errors import EngineError, UsageError
from outrider.progress import SILENT, Progress
from outrider.runtime.costs import Costs
from outrider.runtime.loop import Loop, Round
from outrider.runtime.params import DEFAULTS, SamplingParams
from outrider.runtime.policy import AUTO, BUILT_UP_TO, DRAFTERS, MODEL, NGRAM, Chooser, Fixed, Policy
from outrider.runtime.request import Logprobs, Request
from outrider.runtime.rounds import Rounds
from outrider.runtime.stats import Stats
from outrider.runtime.text import Piece, Text, TextStream


@dataclass(frozen=True, slots=True)
class Event:
    """What one round confirmed.

    `pieces` may lag behind `token_ids`: a character may need more tokens, and text that may become a stop string is
    held back. `finish_reason` is None but on the last event: "stop" (end of text, a stop string or stop token), "length"
    (`max_new_tokens`) or "capacity" (the bundle's cache is full).
    """

    token_ids: tuple[int, ...]
    from_draft: tuple[bool, ...]  # for each token: drafted and accepted, or the target's own
    pieces: tuple[Piece, ...]
    stats: Stats  # of the whole generation so far; one object, which grows
    finish_reason: str | None = None
    logprobs: tuple[Logprobs, ...] | None = None  # of each token, where they were asked for

    @property
    def text(self) -> str:
        """The text that this event adds."""
        return "".join(text for text, _ in self.pieces)


class Answer:
    """One request's answer as it grows: what of each round goes out, and where it ends."""

    def __init__(self, outrider: Outrider, prompt: list[int], params: SamplingParams):
        self.prompt = prompt
        self.params = params
        self.request = outrider.request(params, prompt)
        self.stats = Stats(prompt_tokens=len(prompt))
        self._room = outrider.build.capacity - len(prompt) + 1  # one for each slot that is left, the last token's own included
        self._stream = TextStream(outrider.text.tokenizer, prompt, params.stop_strings)

    @property
    def wanted(self) -> int:
        """Tokens that may still be emitted."""
        return min(self.params.max_new_tokens, self._room) - self.stats.emitted

    def take(self, done: Round) -> Event:
        """What of a round goes out. `stats` is counted, but for its times."""
        wanted = self.wanted
        ids, pieces, finish_reason = self._cut(done)
        accepted = min(len(done.tokens) - 1, len(ids))
        own = len(ids) - accepted
        rejected = own if len(done.tokens) - 1 < done.drafted else 0  # the text may have ended before it
        self.stats.count(done.drafted, accepted, rejected, own, done.drafter == NGRAM)
        if finish_reason is None and len(ids) == wanted:
            finish_reason = "length" if self.stats.emitted == self.params.max_new_tokens else "capacity"
        if finish_reason is not None:
            pieces += self._stream.finish()
        from_draft = tuple(index < accepted for index in range(len(ids)))
        logprobs = None if done.logprobs is None else tuple(done.logprobs[: len(ids)])
        return Event(tuple(ids), from_draft, tuple(pieces), self.stats, finish_reason, logprobs)

    def _cut(self, done: Round) -> tuple[list[int], list[Piece], str | None]:
        """The round's tokens up to where the text ends, their text, and "stop" where it does end."""
        ids: list[int] = []
        pieces: list[Piece] = []
        for token in done.tokens:
            free = self.stats.emitted + len(ids) < self.params.min_new_tokens
            pieces += self._stream.push(token, from_draft=len(ids) < len(done.tokens) - 1, may_stop=not free)
            ids.append(token)
            if self._stream.stopped or token in self.request.end_ids:
                return ids, pieces, "stop"
        return ids, pieces, None


class Outrider:
    """A loaded bundle. One generation at a time: starting another ends the one before. For many at once, see `Scheduler`."""

    def __init__(self, engines: Engines, text: Text, slots: int = 1):
        self.engines = engines
        self.manifest = engines.manifest
        self.build = engines.build
        self.text = text
        self.sessions = {role: engines.session(role, slots) for role in self.manifest.roles}
        self.drafters = [name for name in DRAFTERS if name != MODEL or "draft" in self.sessions]
        samplers = {name: engines.sampler(name) for name in self.manifest.samplers}
        self.vocab_rows = self.manifest.models["target"].vocab_rows
        rounds = Rounds(engines.device, self.sessions, samplers, self.build.k[-1])
        self.loop = Loop(rounds, self.build.k, self.build.max_prompt_chunk)
        self.policy = Policy(Costs(self.manifest, self.build), self.drafters, stops=engines.device.synchronous)
        self._running: object = None

    @classmethod
    def load(
        cls, bundle: str | Path, progress: Progress = SILENT, *, device: str | None = None, slots: int | None = 1
    ) -> Outrider:
        """Check every file of a bundle and load its engines.

        Args:
            device: "cpu" or "cuda"; None is what the bundle was built on.
            slots: texts that there are caches for, at most the batch that the bundle was built for; None is all of them.

        Raises:
            FolderError: the bundle is missing, damaged, or of a newer schema.
            EngineError: its backend is not installed, does not run here, or refuses an engine.
            UsageError: the backend does not run on that device, or the bundle was built for fewer slots.
        """
        folder = Path(bundle)
        manifest, build = open_bundle(folder, progress)
        slots = build.batch if slots is None else slots
        if not 1 <= slots <= build.batch:
            raise UsageError(
                f"this bundle was built for {build.batch} sequences at once, not {slots}", f"build it with --batch {slots}"
            )
        return cls(open_engines(folder, manifest, build, device), Text(folder, manifest), slots)

    def __enter__(self) -> Outrider:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back the device's memory; the bundle cannot be used any more."""
        self._running = None
        del self.loop, self.sessions, self.engines
        gc.collect()  # launches hold buffers, and some hold each other

    @property
    def default_k(self) -> int:
        """The k where nothing chooses: the largest built one up to 4; else the smallest."""
        return max((k for k in self.build.k if k <= BUILT_UP_TO), default=min(self.build.k))

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams = DEFAULTS,
        *,
        k: int | str = AUTO,
        drafter: str | None = None,
        chat: bool = False,
    ) -> Iterator[Event]:
        """The continuation of a prompt (text, or token ids), one event a round.

        Args:
            params: how tokens are chosen, and when the text ends; greedy and 256 tokens where nothing is said.
            k: draft tokens a round: 0 is plain decoding, else one that was built; or "auto", which chooses for every round
                by what rounds cost and how much is accepted.
            drafter: where they come from: "model", "ngram" (what followed earlier in the text), or "auto", whichever
                is faster at the time. None is "auto" where k is, and elsewhere the model, if the bundle has one.
            chat: put the prompt into the bundle's chat template.

        Raises:
            UsageError: at once, before the first event, where an argument is wrong.
            EngineError: from the iterator, where the logits are no numbers.
        """
        if not isinstance(params, SamplingParams):
            raise UsageError(f"params is {params!r}", "give SamplingParams(...)")
        tokens = self.text.encode(prompt, chat=chat) if isinstance(prompt, str) else list(prompt)
        answer = self.answer(tokens, params)
        self.check_drafting(k, drafter)
        return self._events(answer, k, drafter)

    def answer(self, prompt: list[int], params: SamplingParams) -> Answer:
        """A new answer to a prompt.

        Raises:
            UsageError: it cannot be given: see `generate`.
        """
        params.check_tokens(self.vocab_rows)
        self._check(prompt, params)
        return Answer(self, prompt, params)

    def chooser(self, request: Request, k: int | str, drafter: str | None) -> Chooser:
        """What decides on the rounds of a new generation."""
        params = request.params
        if isinstance(k, int):
            return Fixed(drafter or self.drafters[0], k)
        allowed = self.drafters if drafter in (None, AUTO) else [str(drafter)]
        if params.seed is not None and params.temperature > 0 and not params.exact:
            # By the rule of rejection a seed's answer depends on what was drafted, and that must not depend on the time.
            return Fixed(allowed[0], self.default_k)
        self.policy.start(request.greedy, allowed)
        return self.policy

    def request(self, params: SamplingParams, prompt: list[int]) -> Request:
        """The state of a new generation."""
        return Request(params, prompt, self._end_ids(params), self.vocab_rows)

    def _end_ids(self, params: SamplingParams) -> list[int]:
        return [*self.manifest.generation.eos_token_ids, *params.stop_tokens]

    def check_drafting(self, k: int | str, drafter: str | None) -> None:
        """Raise `UsageError` where the bundle has no such k or drafter."""
        if k != AUTO and (type(k) is not int or (k != 0 and k not in self.build.k)):
            built = ", ".join(str(size) for size in [0, *self.build.k])
            raise UsageError(
                f"k = {k} was not built into this bundle; it has k = {built}", "choose one or auto, or build again with --k"
            )
        if drafter not in (None, AUTO, *DRAFTERS):
            raise UsageError(f"there is no drafter {drafter!r}", f"give {', '.join(DRAFTERS)} or {AUTO}")
        if drafter == MODEL and MODEL not in self.drafters:
            raise UsageError("this bundle has no draft model", "leave --drafter out, or export the target with a draft")
        if drafter == AUTO and k != AUTO:
            raise UsageError(
                f"the drafter is {AUTO} where k is {k}", f"leave k out, or give the drafter {DRAFTERS[0]} or {NGRAM}"
            )

    def _check(self, tokens: list[int], params: SamplingParams) -> None:
        if not tokens:
            raise UsageError("the prompt is empty", "give at least one token")
        if not all(isinstance(token, Integral) and 0 <= token < self.vocab_rows for token in tokens):
            raise UsageError(f"the prompt has a token id outside 0..{self.vocab_rows - 1}", "use the bundle's own tokenizer")
        if len(tokens) > self.build.capacity:
            raise UsageError(
                f"the prompt has {len(tokens):,} tokens; the bundle's capacity is {self.build.capacity:,}",
                "shorten it, or build the engine with a larger --capacity",
            )
        room = self.build.capacity - len(tokens) + 1
        if params.min_new_tokens > room:
            raise UsageError(
                f"min_new_tokens is {params.min_new_tokens}; after this prompt the bundle's capacity leaves {room}",
                "ask for fewer, or build the engine with a larger --capacity",
            )
        if params.min_new_tokens and len(set(self._end_ids(params))) == self.vocab_rows:
            raise UsageError("every token is a stop token, and min_new_tokens bans them all", "leave some tokens out")

    def _events(self, answer: Answer, k: int | str, drafter: str | None) -> Iterator[Event]:
        ticket = self._running = object()
        text, stats = self.loop.texts[0], answer.stats
        started = time.perf_counter()
        chooser = self.chooser(answer.request, k, drafter)
        stats.draft_prompt_seconds = self.loop.start(answer.prompt, answer.request, chooser, answer.wanted)
        stats.prompt_seconds = time.perf_counter() - started
        spent = stats.prompt_seconds
        finish_reason = None
        while finish_reason is None:
            if self._running is not ticket:
                raise UsageError("another generation was started on this bundle", "finish one before starting the next")
            begun, engines = time.perf_counter(), self.engine_seconds()
            try:
                done = self.loop.round(text, answer.wanted)
            except EngineError:
                self.loop.clear(text)
                raise
            event = answer.take(done)
            finish_reason = event.finish_reason
            stats.engine_seconds += self.engine_seconds() - engines
            spent += time.perf_counter() - begun
            stats.seconds = spent  # the time between events is the caller's
            yield event

    def engine_seconds(self) -> float:
        """What the engines' own runs took so far."""
        return self.loop.rounds.seconds + sum(session.seconds for session in self.sessions.values())
