"""`Outrider.load(bundle).generate(prompt)`: confirmed tokens as events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.engines.bundle import open_bundle, open_session
from outrider.engines.errors import EngineError, UsageError
from outrider.engines.manifest import ROLES, Build, Manifest
from outrider.engines.progress import SILENT, Progress
from outrider.engines.session import Session
from outrider.runtime.drafter import ModelDrafter
from outrider.runtime.loop import Loop
from outrider.runtime.stats import Stats
from outrider.runtime.text import Piece, Text, TextStream


@dataclass(frozen=True, slots=True)
class Event:
    """What one round confirmed.

    `pieces` may lag behind `token_ids`: a character may need more tokens, and text that may become a stop string is
    held back. `finish_reason` is None but on the last event: "stop" (end of text, or a stop string), "length"
    (`max_new_tokens`) or "capacity" (the bundle's cache is full).
    """

    token_ids: tuple[int, ...]
    from_draft: tuple[bool, ...]  # for each token: drafted and accepted, or the target's own
    pieces: tuple[Piece, ...]
    stats: Stats  # of the whole generation so far; one object, which grows
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        """The text that this event adds."""
        return "".join(text for text, _ in self.pieces)


class Outrider:
    """A loaded bundle. One generation at a time: starting another ends the one before."""

    def __init__(self, manifest: Manifest, build: Build, text: Text, target: Session, draft: Session):
        self.manifest = manifest
        self.build = build
        self.text = text
        self.sessions = {"target": target, "draft": draft}
        chunk = build.max_prompt_chunk
        self._loop = Loop(target, ModelDrafter(draft, chunk, target.vocab_rows), build.k, chunk)
        self._running: object = None

    @classmethod
    def load(cls, bundle: str | Path, progress: Progress = SILENT) -> Outrider:
        """Check every file of a bundle and load its engines.

        Raises:
            FolderError: the bundle is missing, damaged, or of a newer schema.
            EngineError: its backend is not installed or refuses an engine.
        """
        folder = Path(bundle)
        manifest, build = open_bundle(folder, progress)
        target, draft = (open_session(folder, manifest, build, role, batch=1) for role in ROLES)
        return cls(manifest, build, Text(folder, manifest), target, draft)

    @property
    def default_k(self) -> int:
        """The largest built k up to 4, which is where most pairs do best; else the smallest."""
        return max((k for k in self.build.k if k <= 4), default=min(self.build.k))

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 256,
        k: int | None = None,
        stop: str | Sequence[str] = (),
        chat: bool = False,
    ) -> Iterator[Event]:
        """Greedy continuation of a prompt (text, or token ids), one event a round.

        Args:
            max_new_tokens: at least 1.
            k: draft tokens a round: 0 is plain decoding, else one that was built; None is `default_k`.
            stop: a string or several that end the text; they are not part of it.
            chat: put the prompt into the bundle's chat template.

        Raises:
            UsageError: at once, before the first event, where an argument is wrong.
            EngineError: from the iterator, where the logits are no numbers.
        """
        tokens = self.text.encode(prompt, chat=chat) if isinstance(prompt, str) else list(prompt)
        k = self.default_k if k is None else k
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        self._check(tokens, max_new_tokens, k, stop)
        return self._events(tokens, max_new_tokens, k, TextStream(self.text.tokenizer, tokens, stop))

    def _check(self, tokens: list[int], max_new_tokens: int, k: int, stop: tuple[str, ...]) -> None:
        rows = self.manifest.models["target"].vocab_rows
        if not tokens:
            raise UsageError("the prompt is empty", "give at least one token")
        if not all(0 <= token < rows for token in tokens):
            raise UsageError(f"the prompt has a token id outside 0..{rows - 1}", "use the bundle's own tokenizer")
        if len(tokens) > self.build.capacity:
            raise UsageError(
                f"the prompt has {len(tokens):,} tokens; the bundle's capacity is {self.build.capacity:,}",
                "shorten it, or build the engine with a larger --capacity",
            )
        if max_new_tokens < 1:
            raise UsageError(f"max_new_tokens is {max_new_tokens}; it must be at least 1", "ask for at least one token")
        if k != 0 and k not in self.build.k:
            built = ", ".join(str(size) for size in [0, *self.build.k])
            raise UsageError(
                f"k = {k} was not built into this bundle; it has k = {built}", "choose one, or build again with --k"
            )
        if not all(stop):
            raise UsageError("a stop string is empty", "give at least one character")

    def _events(self, prompt: list[int], limit: int, k: int, stream: TextStream) -> Iterator[Event]:
        ticket = self._running = object()
        stats = Stats(prompt_tokens=len(prompt))
        started = time.perf_counter()
        self._loop.start(prompt, k)
        stats.prompt_seconds = time.perf_counter() - started
        spent = stats.prompt_seconds
        finish_reason = None
        while finish_reason is None:
            if self._running is not ticket:
                raise UsageError("another generation was started on this bundle", "finish one before starting the next")
            begun, engines = time.perf_counter(), self._engine_seconds()
            wanted = min(limit - stats.emitted, self._loop.room)
            try:
                outcome = self._loop.round(k, wanted)
            except EngineError:
                for session in self.sessions.values():
                    session.clear()
                raise
            ids, pieces, finish_reason = self._emit(outcome.drafted[: outcome.accepted], outcome.own, stream)
            accepted = min(outcome.accepted, len(ids))
            own = len(ids) - accepted
            rejected = own if outcome.accepted < len(outcome.drafted) else 0  # the text may have ended before it
            stats.count(len(outcome.drafted), accepted, rejected, own)
            if finish_reason is None and len(ids) == wanted:
                finish_reason = "length" if stats.emitted == limit else "capacity"
            if finish_reason is not None:
                pieces += stream.finish()
            stats.engine_seconds += self._engine_seconds() - engines
            spent += time.perf_counter() - begun
            stats.seconds = spent  # the time between events is the caller's
            from_draft = tuple(index < accepted for index in range(len(ids)))
            yield Event(tuple(ids), from_draft, tuple(pieces), stats, finish_reason)

    def _engine_seconds(self) -> float:
        return sum(session.seconds for session in self.sessions.values())

    def _emit(self, accepted: list[int], own: int, stream: TextStream) -> tuple[list[int], list[Piece], str | None]:
        """The round's tokens up to where the text ends, their text, and "stop" where it does end."""
        ids: list[int] = []
        pieces: list[Piece] = []
        for token in [*accepted, own]:
            pieces += stream.push(token, from_draft=len(ids) < len(accepted))
            ids.append(token)
            if stream.stopped or token in self.manifest.generation.eos_token_ids:
                return ids, pieces, "stop"
        return ids, pieces, None
