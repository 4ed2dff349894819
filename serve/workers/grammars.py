"""Grammars of answers. Workers compute their masks: one worker for each owner of requests. A new grammar is compiled and tried
in a fork of that worker, so that no answer waits for a grammar that takes too long. If it succeeds, the fork takes the worker's
place: it has all grammars of the owner compiled, and answers continue in it.

The time and memory that a client's grammar takes are its worker's. The engines wait only briefly for a mask, and only a limited
share of the time. Beyond that, the answer does not draft, and skips rounds until its mask has arrived.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import threading
import time
import weakref
from collections.abc import Hashable, Sequence
from concurrent.futures import Future

import msgspec
import numpy as np

from outrider.errors import EngineError
from outrider.runtime.grammar.compiler import MAX_COMPILED, Grammars
from outrider.runtime.grammar.errors import GrammarError, refused
from outrider.runtime.grammar.matcher import Bools, Matcher
from outrider.runtime.grammar.structured import StructuredOutputs
from outrider.runtime.matching import matching
from outrider.serve.workers.messages import Advance, Begin, Compile, Masks, Reply, Valid
from outrider.serve.workers.worker_main import GRAMMAR_SECONDS, takes_much
from outrider.serve.workers.workers import Worker, WorkerEndedError, Workers

MAX_OWNERS = 16  # owners that have a worker at the same time
PATIENCE = 0.02  # seconds that the engines wait for one mask, at most
WAITING = 0.1  # share of the time that the engines may wait for masks of all owners together
SAVED = 0.1  # seconds of waiting that an owner may save up
# An answer fails if its workers end too often: if the sum exceeds ENDS. Each end counts 1, or AT_WORK if the worker was working
# on this answer, which then is the most likely reason.
ENDS, AT_WORK = 4, 3


class GrammarBusyError(GrammarError):
    """The grammars of other owners occupy all workers."""


class Owner:
    """An owner's worker, and how long the engines may wait for it."""

    def __init__(self, worker: Worker):
        self.worker = worker
        self.tried: dict[bytes, None] = {}  # digests of grammars, the latest last
        self._since, self._trying = time.monotonic(), 0.0
        self.answers: weakref.WeakSet[RemoteMatcher] = weakref.WeakSet()
        self.used = time.monotonic()
        self._left, self._counted = SAVED, self.used

    def patience(self, owners: int) -> float:
        """Return how many seconds to wait for a mask, given the number of owners."""
        now = time.monotonic()
        self._left = min(self._left + (now - self._counted) * WAITING / owners, SAVED)
        self._counted = now
        return max(min(self._left, PATIENCE), 0.0)

    def waited(self, seconds: float) -> None:
        """Record how long the engines have waited for a mask."""
        self._left -= seconds

    def replace(self, worker: Worker) -> None:
        """Let another worker, which has the owner's grammars compiled, take the worker's place. Answers start again in it."""
        former, self.worker = self.worker, worker
        former.close()

    @property
    def greedy(self) -> bool:
        """Whether its trials have taken so much time that they get the lowest priority."""
        return takes_much(self._trying, self._since)

    def took(self, seconds: float) -> None:
        """Record how long a trial has taken."""
        self._trying += seconds


class RemoteGrammars(Grammars):
    """Starts answers in workers. Thread-safe."""

    def __init__(self, workers: Workers, vocab_rows: int, end_ids: Sequence[int]):
        """Take the workers, the width of the logits, and the tokens that end a text."""
        self.vocab_rows, self.end_ids = vocab_rows, frozenset(end_ids)
        self.numbers = itertools.count()  # of answers
        self._workers = workers
        self.owners: dict[Hashable, Owner] = {}
        self._lock = threading.Lock()

    def owner(self, key: Hashable) -> Owner:
        """Return an owner of requests with its worker.

        Raises:
            GrammarBusyError: there are too many.
            EngineError: the worker does not start.
        """
        with self._lock:
            owner = self.owners.get(key)
            if owner is None or owner.worker.ended:
                self.owners = {key: each for key, each in self.owners.items() if not each.worker.ended}
                if len(self.owners) >= MAX_OWNERS:
                    idle = [key for key, each in self.owners.items() if not each.answers and not each.worker.busy]
                    if not idle:
                        raise GrammarBusyError("the grammars of other requests occupy all workers", "try again in a moment")
                    self.owners.pop(min(idle, key=lambda key: self.owners[key].used)).worker.close()
                owner = self.owners[key] = Owner(self._workers.fork())
            owner.used = time.monotonic()
            return owner

    async def compile(self, structured: StructuredOutputs, key: Hashable, opening: Sequence[int] = ()) -> None:
        """Compile a grammar and try its masks, unless its owner's worker has done so already.

        Args:
            opening: see `rehearse`.

        Raises:
            UsageError: the grammar cannot be compiled, or takes too long, or no token can end a text.
            GrammarBusyError, EngineError: see `owner`.
        """
        if not self.end_ids:
            raise refused("this bundle has no token that ends a text", "export a checkpoint that names its eos_token_id")
        owner = await asyncio.to_thread(self.owner, key)
        arguments = structured.arguments()
        digest = hashlib.sha256(msgspec.json.encode(arguments)).digest()
        if owner.tried.pop(digest, False) is None:
            owner.tried[digest] = None
            return
        try:
            trial = await owner.worker.fork()
        except WorkerEndedError:  # at a limit, or after a minute without work
            trial = await asyncio.to_thread(self._workers.fork)
        started = time.monotonic()
        try:
            reply = await trial.reply(Compile(arguments, [*opening], owner.greedy))
            if reply.error:
                raise refused(reply.error, reply.hint)
            owner = await asyncio.to_thread(self.owner, key)  # meanwhile its worker may have ended
            owner.replace(trial)
        except WorkerEndedError as error:
            if time.monotonic() - started >= GRAMMAR_SECONDS:
                raise refused(f"the grammar takes longer than {GRAMMAR_SECONDS:g} seconds to compile", "simplify it") from error
            raise refused("the process that compiles grammars has crashed on the grammar", "simplify it") from error
        finally:
            owner.took(time.monotonic() - started)
            if owner.worker is not trial:
                trial.close()
        owner.tried[digest] = None
        while len(owner.tried) > MAX_COMPILED:
            del owner.tried[next(iter(owner.tried))]

    def begin(self, structured: StructuredOutputs, owner: Hashable = None) -> RemoteMatcher:
        """Return the matcher of a new answer, and start it in the owner's worker."""
        return RemoteMatcher(self, structured, owner)


class RemoteMatcher(Matcher):
    """A matcher in a worker. If the worker ends, another one continues the answer."""

    def __init__(self, grammars: RemoteGrammars, structured: StructuredOutputs, key: Hashable):
        """Start an answer."""
        self._grammars, self._structured, self._key = grammars, structured, key
        self._confirmed: list[int] = []
        self._plain = False  # whether this answer no longer drafts
        self._ends = 0
        self._begin()

    def _begin(self) -> None:
        self._number = next(self._grammars.numbers)
        try:
            if self._ends > ENDS:
                raise GrammarError("a step of the grammar takes too long, or its process crashes", "simplify it")
            self._owner = self._grammars.owner(self._key)
            self._worker = self._owner.worker
        except EngineError as error:
            failed: Future[Reply] = Future()
            failed.set_exception(error)
            return self._await(failed)
        self._owner.answers.add(self)
        weakref.finalize(self, self._worker.drop, self._number).atexit = False
        return self._await(self._worker.ask(Begin(self._number, self._structured.arguments(), self._confirmed)))

    def _await(self, reply: Future[Reply]) -> None:
        self._coming = reply  # has the mask after the confirmed tokens
        self._late = False  # whether a reply about drafted tokens did not arrive in time
        self._ahead: list[int] = []  # drafted tokens whose masks are known
        self._masks: list[Bools] = []  # after the first 0, 1, ... of these

    def ready(self, patient: bool = True) -> bool:
        """See `Matcher.ready`. Start again in another worker if this one has ended."""
        if not self._coming.done() and (not patient or not self._in_time(self._coming)):
            return False
        error = self._coming.exception()
        if isinstance(error, WorkerEndedError):
            if not self._worker.closed:
                self._ends += AT_WORK if error.at_work else 1
            self._begin()
            return self._coming.done()
        return True

    @property
    def _patience(self) -> float:
        return self._owner.patience(len(self._grammars.owners))

    def _in_time(self, reply: Future[Reply]) -> bool:
        began = time.monotonic()
        try:
            reply.exception(self._patience)
        except TimeoutError:
            return False
        finally:
            self._owner.waited(time.monotonic() - began)
        return True

    def _first(self) -> Reply:
        reply = self._checked(self._coming.result())
        if not self._masks:
            self._masks = self._unpacked(reply)
        return reply

    @staticmethod
    def _checked(reply: Reply) -> Reply:
        if reply.error:
            raise GrammarError(reply.error, reply.hint)
        return reply

    def _unpacked(self, reply: Reply) -> list[Bools]:
        packed = (np.frombuffer(mask, np.uint8) for mask in reply.masks)
        return [np.unpackbits(each, bitorder="little", count=self._grammars.vocab_rows).view(np.bool_) for each in packed]

    def _try(self, message: Masks | Valid) -> Reply | None:
        """Ask about drafted tokens. Return None if the reply is late; then nothing more is asked until the next round."""
        if self._plain or self._late or not self._patience:
            return None
        reply = self._worker.ask(message)
        if self._in_time(reply) and not isinstance(reply.exception(), WorkerEndedError):
            return self._checked(reply.result())
        self._late = True
        return None

    def masks(self, drafted: Sequence[int]) -> tuple[list[Bools], int]:
        """See `Matcher.masks`."""
        self._first()
        drafted = list(drafted)
        count = matching(self._ahead, drafted)
        del self._ahead[count:], self._masks[count + 1 :]
        rows = len(drafted) + 1
        if len(drafted) > count and self._masks[count][drafted[count]] and drafted[count] not in self._grammars.end_ids:
            reply = self._try(Masks(self._number, drafted, count + 1))
            if reply is None or reply.count == 1:
                self._plain |= reply is not None
                rows = 1 if self._plain else count + 1
            else:
                self._masks += self._unpacked(reply)
                self._ahead = drafted[: len(self._masks) - 1]
        return self._masks[:rows], rows

    def forced(self, limit: int) -> list[int]:
        """See `Matcher.forced`."""
        forced = self._first().forced
        return forced[:limit] if self._patience and not self._plain else []

    def valid(self, tokens: list[int]) -> int:
        """See `Matcher.valid`."""
        if tokens == self._first().forced[: len(tokens)]:
            return len(tokens)  # without a message
        reply = self._try(Valid(self._number, tokens))
        return 0 if reply is None else reply.count

    def advance(self, tokens: Sequence[int]) -> None:
        """See `Matcher.advance`. Errors appear in the next round."""
        self._confirmed += tokens
        self._await(self._worker.ask(Advance(self._number, tokens)))
