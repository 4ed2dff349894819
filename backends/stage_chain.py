"""The stages in other processes, one after the other: how a pass reaches them, and what is said if it does not come back.

If all processes are on one machine, they are a compiled graph of Ray: each reads what the one before wrote to shared memory,
which takes less than half the time of a call of an actor. Between machines each stage is a call of an actor instead. It names
the result of the stage before, which Ray carries: up to 100 kB with the calls, through this process, and more from machine to
machine. There, a compiled graph is no faster with Ray 2.60, and a thread of each process that sends never sleeps, also between
requests.
"""

from __future__ import annotations

import logging
import pickle
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy.typing as npt
import ray
from ray.dag import InputNode
from ray.exceptions import ActorHandleNotFoundError, GetTimeoutError, RayChannelTimeoutError, RayError, RayTaskError
from ray.experimental.channel.shared_memory_channel import CompositeChannel, SharedMemoryType

from outrider.backends.stage_host import AGAIN, Call, Crossing, PassedOn
from outrider.errors import OutriderError, StageError, reason_of

OPENING = 600.0  # seconds for actors to find a place, and as many to load their stages
UNDER_WAY = 2  # passes: one of each half of a batch
ASKING = 1.0  # seconds for actors to say how far they are, after a failure
PART, PAUSE = 0.02, 0.002  # a waiting reader sleeps for this share of its wait so far, and at most this many seconds
LOGGER = logging.getLogger("outrider.serve")
ROOM = "ray status shows whether a node has enough free cores, and a GPU for a stage on one; use fewer cores with --stage-cores"
LOADING = "its disk may be slow, or its machine short of memory; Ray's logs have more (/tmp/ray/session_latest/logs)"
SHARED = "Ray's object store may be too small: see ray start --object-store-memory"


class Channel(CompositeChannel):  # type: ignore[misc]  # Ray's types are not checked
    """Ray's channel, whose reader sleeps while nothing comes.

    Ray's own reader never sleeps: every stage would keep a core busy at all times, also between requests, and slow down the
    stage that it waits for if they share the core.
    """

    def read(self, timeout: float | None = None) -> Any:
        """Return the next value. `timeout` is in seconds; None waits for ever."""
        began = time.monotonic()
        while True:
            try:
                return super().read(0)
            except RayChannelTimeoutError:
                waited = time.monotonic() - began
                if timeout is not None and 0 <= timeout <= waited:
                    raise
            time.sleep(min(waited * PART, PAUSE))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), super().__reduce__()[1]


class ChannelType(SharedMemoryType):  # type: ignore[misc]
    """The type of values that travel over a `Channel`."""

    def create_channel(self, writer: Any, reader_and_node_list: Any, driver_actor_id: str | None = None) -> Channel:
        """Return a channel with room for the passes that are under way."""
        return Channel(writer, reader_and_node_list, UNDER_WAY, driver_actor_id)


def _graph(actors: Sequence[Any], timeout: float) -> Any:
    logging.getLogger("ray.dag.compiled_dag_node").setLevel(logging.CRITICAL)  # it logs tracebacks of actors that are killed
    with InputNode() as node:
        node.type_hint = ChannelType()
        for actor in actors:
            node = actor.run.bind(node)
            node.type_hint = ChannelType()
    return node.experimental_compile(_max_inflight_executions=UNDER_WAY, _submit_timeout=timeout)


def _end(actors: Sequence[Any]) -> None:
    if ray.is_initialized():
        for actor in actors:
            with suppress(ActorHandleNotFoundError):  # it has ended with an earlier cluster of this process
                ray.kill(actor)


class Sent(NamedTuple):
    """A pass that is under way."""

    number: int
    answer: Any
    """of Ray"""


class Chain:
    """The actors of consecutive stages, which end with this object."""

    def __init__(self, actors: Mapping[str, Any], timeout: float, graph: bool = True):
        """Call these actors, by the names of their stages; `timeout` is in seconds, for a pass.

        Without `graph`, they are called one by one on one machine, too.
        """
        self._names, self._actors = [*actors], [*actors.values()]
        self._timeout, self._graphs = timeout, graph
        self._graph: Any = None
        self._calls: list[Call] = []  # that travel with the next pass
        self._passes = 0
        self._failure: tuple[str, str] | None = None  # message and hint
        self._asked: list[Any] = []  # whether the stages live
        self._until = 0.0  # when they must have answered, by `time.monotonic`
        self._ended = weakref.finalize(self, _end, self._actors)

    def open(self, *arguments: Any) -> None:
        """Call `StageHost.open` of all actors, and connect them.

        Raises:
            StageError: one cannot be opened, or finds no place in time.
        """
        self._wait([actor.done.remote() for actor in self._actors], "found no place", ROOM)
        self._wait([actor.open.remote(index, *arguments) for index, actor in enumerate(self._actors)], "did not load", LOADING)
        try:
            nodes = ray.get([actor.join.remote() for actor in self._actors], timeout=OPENING)
            if self._graphs and {*nodes} == {ray.get_runtime_context().get_node_id()}:
                self._graph = _graph(self._actors, self._timeout)
        except RayError as error:
            reason = f"the stages cannot be connected: {type(error).__name__}: {reason_of(error)}"
            raise self._fail(error, reason, SHARED) from error

    @property
    def is_graph(self) -> bool:
        """Whether the stages are a compiled graph."""
        return self._graph is not None

    def _wait(self, answers: Sequence[Any], late: str, hint: str) -> None:
        try:
            ray.get(answers, timeout=OPENING)
        except RayError as error:
            reason = self._first(answers, f"{late} within {OPENING:g} seconds") or reason_of(error)
            raise self._fail(error, reason, hint if isinstance(error, GetTimeoutError) else AGAIN) from error

    def later(self, method: str, *arguments: Any) -> None:
        """Call a method of all sessions before the next pass. An error appears there."""
        self._calls.append((method, arguments))

    def send(self, message: Crossing) -> Sent:
        """Begin a pass. Up to `UNDER_WAY` may be under way; they are received in the order in which they were sent.

        Raises:
            StageError: a stage failed, now or earlier, or took too long.
        """
        message, self._calls = message._replace(calls=self._calls), []
        self._passes += 1
        with self._watched(self._passes):
            found: Any = message
            if self._graph is not None:
                found = self._graph.execute(message)
            else:
                found = pickle.dumps(message)
                for actor in self._actors:
                    found = actor.call.remote(found)
        return Sent(self._passes, found)

    def receive(self, sent: Sent) -> PassedOn:
        """Wait for a pass, and return what the last stage gives. Errors are those of `send`."""
        number, found = sent
        with self._watched(number):
            called = self._graph is None
            found = pickle.loads(ray.get(found, timeout=self._timeout)) if called else found.get(self._timeout)
        given: PassedOn = found.given
        return given

    @contextmanager
    def _watched(self, number: int) -> Iterator[None]:
        """Turn an error of the pass with this number into that of a stage, which all later passes get, too."""
        self._check()
        try:
            yield
        except Exception as error:  # Ray also raises plain ones
            asked, late = [actor.done.remote() for actor in self._actors], f"did not answer within {self._timeout:g} seconds"
            lost = f"what {self._names[-1]} gave did not arrive: {type(error).__name__}: {reason_of(error)}"
            raise self._fail(error, self._first(asked, late, number) or lost, AGAIN) from error
        except BaseException as error:  # Ctrl-C: the stages may be ahead of this process
            self._fail(error, "a pass was interrupted", AGAIN)
            raise

    def close(self) -> None:
        """End the actors. All later passes fail."""
        self._failure = self._failure or ("the stages have been ended", AGAIN)
        self._ended()
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.teardown()  # or Ray waits for the other pass when its answer is dropped

    def cache(self) -> dict[str, npt.NDArray[Any]]:
        """Return the caches of all stages; see `Session.cache`.

        Raises:
            StageError: a stage failed, now or earlier, or took too long.
        """
        self._check()
        calls, self._calls = self._calls, []
        asked = [actor.cache.remote(calls) for actor in self._actors]
        try:
            found = ray.get(asked, timeout=self._timeout)
        except RayError as error:
            raise self._lost(error, asked) from error
        return {name: tensor for each in found for name, tensor in each.items()}

    def check(self) -> None:
        """Look, without waiting, at what the stages have answered since the last call, and ask them again.

        Raises:
            StageError: one has died, or has not answered within the limit of a pass.
        """
        self._check()
        try:
            ray.get(self._asked, timeout=0)
            self._asked, self._until = [actor.done.remote() for actor in self._actors], time.monotonic() + self._timeout
        except Exception as error:  # Ray also raises plain ones
            if not isinstance(error, GetTimeoutError) or time.monotonic() > self._until:
                raise self._lost(error, self._asked) from error

    def _lost(self, error: Exception, asked: Sequence[Any]) -> StageError:
        reason = self._first(asked, f"did not answer within {self._timeout:g} seconds")
        return self._fail(error, reason or reason_of(error), AGAIN)

    def _check(self) -> None:
        if self._failure is not None:
            raise StageError(*self._failure)

    def _fail(self, error: BaseException, message: str, hint: str) -> StageError:
        """End the actors, and return the error of this pass and of all later ones."""
        cause = error.cause if isinstance(error, RayTaskError) else None
        self._failure = (str(cause), cause.hint) if isinstance(cause, OutriderError) else (message, hint)
        self.close()
        return StageError(*self._failure)

    def _first(self, answers: Sequence[Any], late: str, least: int = 0) -> str | None:
        """Return which stage died or, if none did, the first whose answer is missing or below `least`, if there is one."""
        ready, found = ray.wait(answers, num_returns=len(answers), timeout=ASKING)[0], None
        for name, answer in zip(self._names, answers, strict=True):
            try:
                if found is None and (answer not in ready or (least and ray.get(answer) < least)):
                    found = f"{name} {late}"
                elif answer in ready:
                    ray.get(answer)
            except RayError as death:
                reason = reason_of(death.cause if isinstance(death, RayTaskError) else death)  # without a remote traceback
                LOGGER.info("a stage has failed", extra={"stage": name, "error": reason})  # clients see no addresses
                return f"{name} failed: {type(death).__name__}"
        return found
