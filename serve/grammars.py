"""Grammars of answers, whose masks workers compute: one worker for each owner of requests, and one that tries new grammars.

What a client's grammar takes in time and memory is its workers'. The engines wait for a mask for a moment, and not at all where
the owner's masks have been late: then an answer drafts nothing, and sits out rounds until its mask has come.
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
from outrider.runtime.grammar import Bools, GrammarError, Grammars, Matcher
from outrider.runtime.matching import matching
from outrider.runtime.structured import StructuredOutputs, refused
from outrider.serve.worker_main import GRAMMAR_SECONDS, Advance, Begin, Compile, Masks, Reply, Valid
from outrider.serve.workers import Worker, WorkerEndedError, Workers

MAX_OWNERS = 16  # whose grammars have workers at once
MAX_TRIED = 64  # grammars of an owner that are not tried again
PATIENCE = 0.02  # seconds that the engines wait for a mask
PENALTY, MAX_PENALTY = 1.0, 16.0  # seconds without waiting, after a mask that was late; each time twice as many
# How often an answer's worker may end: twice while it works on that answer, which then is most likely the reason, or more often
# while it works on others.
ENDS, AT_WORK = 4, 3


class GrammarBusyError(GrammarError):
    """The grammars of other owners leave no room for that of a new one."""


class Owner:
    """An owner's workers, and how patient the engines are with them."""

    def __init__(self, worker: Worker):
        self.worker = worker  # of its answers
        self.trial: Worker | None = None  # of grammars that may take too long, which no answer is to wait for
        self.tried: dict[bytes, None] = {}  # digests of grammars, the latest last
        self.answers: weakref.WeakSet[RemoteMatcher] = weakref.WeakSet()
        self.used = time.monotonic()
        self._impatient, self._penalty = 0.0, PENALTY

    @property
    def patience(self) -> float:
        """The seconds to wait."""
        return 0.0 if time.monotonic() < self._impatient else PATIENCE

    @property
    def idle(self) -> bool:
        """Whether no request needs the workers now."""
        return not (self.answers or self.worker.busy or (self.trial is not None and self.trial.busy))

    def close(self) -> None:
        """End the workers."""
        self.worker.close()
        if self.trial is not None:
            self.trial.close()

    def late(self) -> None:
        """Note that a mask did not come in time."""
        now = time.monotonic()
        if now >= self._impatient:
            self._penalty = PENALTY if now > self._impatient + MAX_PENALTY else min(2 * self._penalty, MAX_PENALTY)
            self._impatient = now + self._penalty


class RemoteGrammars(Grammars):
    """Begins answers in workers. Any thread may ask."""

    def __init__(self, workers: Workers, vocab_rows: int, end_ids: Sequence[int]):
        """Take the workers, the width of the logits, and the tokens that end a text."""
        self.vocab_rows, self.end_ids = vocab_rows, frozenset(end_ids)
        self.numbers = itertools.count()  # of answers
        self._workers = workers
        self._owners: dict[Hashable, Owner] = {}
        self._lock = threading.Lock()

    def owner(self, key: Hashable) -> Owner:
        """Return an owner of requests with its worker.

        Raises:
            GrammarBusyError: there are too many.
            EngineError: the worker does not start.
        """
        with self._lock:
            owner = self._owners.get(key)
            if owner is None or owner.worker.ended:
                self._owners = {key: each for key, each in self._owners.items() if not each.worker.ended}
                if len(self._owners) >= MAX_OWNERS:
                    idle = [key for key, each in self._owners.items() if each.idle]
                    if not idle:
                        raise GrammarBusyError("the grammars of other requests leave no room", "try again in a moment")
                    self._owners.pop(min(idle, key=lambda key: self._owners[key].used)).close()
                owner = self._owners[key] = Owner(self._workers.fork())
            owner.used = time.monotonic()
            return owner

    def _trial(self, owner: Owner) -> Worker:
        with self._lock:
            if owner.trial is None or owner.trial.ended:
                owner.trial = self._workers.fork()
            return owner.trial

    async def compile(self, structured: StructuredOutputs, key: Hashable) -> None:
        """Compile a grammar and try its masks, unless its owner has just done so.

        Raises:
            UsageError: it cannot be compiled, or takes too long, or no token can end a text.
            GrammarBusyError, EngineError: see `owner`.
        """
        if not self.end_ids:
            raise refused("this bundle has no token that ends a text", "export a checkpoint that names its eos_token_id")
        message = Compile(structured.arguments())
        digest = hashlib.sha256(msgspec.json.encode(message)).digest()
        owner = await asyncio.to_thread(self.owner, key)
        if owner.tried.pop(digest, False) is None:
            owner.tried[digest] = None
            return
        trial = await asyncio.to_thread(self._trial, owner)
        started = time.monotonic()
        try:
            reply = await trial.reply(message)
        except WorkerEndedError as error:
            if time.monotonic() - started >= GRAMMAR_SECONDS:
                raise refused(f"the grammar takes longer than {GRAMMAR_SECONDS:g} seconds to compile", "simplify it") from error
            raise refused("the process that compiles grammars has crashed on the grammar", "simplify it") from error
        if reply.error:
            raise refused(reply.error, reply.hint)
        owner.tried[digest] = None
        while len(owner.tried) > MAX_TRIED:
            del owner.tried[next(iter(owner.tried))]

    def begin(self, structured: StructuredOutputs, owner: Hashable = None) -> RemoteMatcher:
        """Return a new answer's place in a grammar, which the owner's worker is told of."""
        return RemoteMatcher(self, structured, owner)


class RemoteMatcher(Matcher):
    """A matcher in a worker. If that ends, the answer goes on in another one."""

    def __init__(self, grammars: RemoteGrammars, structured: StructuredOutputs, key: Hashable):
        """Begin at the start of an answer."""
        self._grammars, self._structured, self._key = grammars, structured, key
        self._confirmed: list[int] = []
        self._plain = False  # whether no drafted token is followed any more
        self._ends = 0
        self._begin()

    def _begin(self) -> None:
        self._number = next(self._grammars.numbers)
        try:
            if self._ends > ENDS:
                raise GrammarError("a step of the grammar takes too long, or its process crashes", "simplify it")
            self._owner = self._grammars.owner(self._key)
        except EngineError as error:
            failed: Future[Reply] = Future()
            failed.set_exception(error)
            return self._await(failed)
        self._owner.answers.add(self)
        weakref.finalize(self, self._owner.worker.drop, self._number).atexit = False
        return self._await(self._owner.worker.ask(Begin(self._number, self._structured.arguments(), self._confirmed)))

    def _await(self, reply: Future[Reply]) -> None:
        self._coming = reply  # what may follow the confirmed tokens
        self._late = False  # whether the masks behind drafted tokens are
        self._ahead: list[int] = []  # drafted tokens
        self._masks: list[Bools] = []  # after the first 0, 1, ... of these
        self.rows = 1

    def ready(self, patient: bool = True) -> bool:
        """See `Matcher.ready`. Begin again if the worker has ended."""
        if not self._coming.done():
            if not patient:
                return False
            try:
                self._coming.exception(self._owner.patience)
            except TimeoutError:
                self._owner.late()
                return False
        error = self._coming.exception()
        if isinstance(error, WorkerEndedError):
            self._ends += AT_WORK if error.at_work else 1
            self._begin()
            return self._coming.done()
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
        """Return the reply to what is about drafted tokens, if it comes in time; until the next round nothing is asked then."""
        if self._plain or self._late or not self._owner.patience:
            return None
        try:
            return self._checked(self._owner.worker.ask(message).result(self._owner.patience))
        except TimeoutError:
            self._owner.late()
        except WorkerEndedError:
            pass
        self._late = True
        return None

    def masks(self, drafted: Sequence[int]) -> list[Bools]:
        """See `Matcher.masks`."""
        self._first()
        drafted = list(drafted)
        count = matching(self._ahead, drafted)
        del self._ahead[count:], self._masks[count + 1 :]
        self.rows = len(drafted) + 1
        if len(drafted) > count and self._masks[count][drafted[count]] and drafted[count] not in self._grammars.end_ids:
            reply = self._try(Masks(self._number, drafted, count + 1))
            if reply is None or reply.count == 1:
                self._plain |= reply is not None
                self.rows = 1 if self._plain else count + 1
            else:
                self._masks += self._unpacked(reply)
                self._ahead = drafted[: len(self._masks) - 1]
        return self._masks[: self.rows]

    def forced(self, limit: int) -> list[int]:
        """See `Matcher.forced`."""
        forced = self._first().forced
        return forced[:limit] if self._owner.patience and not self._plain else []

    def valid(self, tokens: list[int]) -> int:
        """See `Matcher.valid`."""
        self._first()
        reply = self._try(Valid(self._number, tokens))
        return 0 if reply is None else reply.count

    def advance(self, tokens: Sequence[int]) -> None:
        """See `Matcher.advance`. What is wrong with them is seen in the next round."""
        self._confirmed += tokens
        self._await(self._owner.worker.ask(Advance(self._number, tokens)))
