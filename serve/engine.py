"""The thread that runs the engines, and how the server's event loop submits requests to it."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from outrider.bundle.integrity import FolderWatch
from outrider.errors import EngineError, FolderError, OutriderError, StageError
from outrider.runtime.loaded import LoadedBundle
from outrider.runtime.memory.memory import Memory
from outrider.runtime.params import SamplingParams
from outrider.runtime.request import Request
from outrider.runtime.request_queue import QueueFullError
from outrider.runtime.scheduler import Scheduler
from outrider.runtime.text.stream import NONE_SHOWN
from outrider.serve.deliveries import Deliveries, Delivery, Result, call_soon, settle
from outrider.serve.lost_stages import LOOKING, look_for_lost_stages, lost_stage, replace_stages
from outrider.serve.metrics import Metrics
from outrider.serve.settings import Settings
from outrider.serve.turns import Turns
from outrider.serve.watchdog import Watchdog, bug, warm_up
from outrider.serve.workers.grammars import RemoteGrammars
from outrider.serve.workers.prompts import PromptEncoder
from outrider.serve.workers.workers import Workers

LOGGER = logging.getLogger("outrider.serve")


class NotReadyError(OutriderError):
    """The bundle is still loading or could not be loaded, the engines are broken, or the server is shutting down."""


class EngineThread:
    """Loads a bundle in a thread, and steps its scheduler while there are requests."""

    def __init__(self, bundle: Path, load: Callable[[], Scheduler], metrics: Metrics, timeout: float):
        """Prepare the thread without starting it.

        Args:
            bundle: the folder to watch for changes.
            load: loads the bundle; called in the thread.
            metrics: updated as requests begin and end.
            timeout: seconds from the submission of a request to its last token.
        """
        self.metrics = metrics
        self.workers = Workers()
        self.prompts = PromptEncoder(self.workers)
        self.grammars: RemoteGrammars  # made with the scheduler
        self.reading, self.compiling = Turns(), Turns()  # for prompts and for grammars
        self.failure: OutriderError | None = None  # why the engines cannot be used, for good or until stages are replaced
        self.loaded = threading.Event()  # set when the bundle is ready or has failed to load
        self._bundle, self._load, self._timeout = bundle, load, timeout
        self._thread = threading.Thread(target=self._run, name="engines", daemon=True)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # calls for the thread to make
        self.running: Scheduler | None = None  # while the engines are ready
        self._watchdog: Watchdog  # made with the scheduler
        self.deliveries = Deliveries(metrics)  # the watchdog's probe is not among them
        self._step_started: float | None = None
        self._ending = self._replaced = False  # whether the thread shall end; whether the bundle's folder has been replaced

    @classmethod
    def from_settings(cls, settings: Settings, memory: Memory | None) -> Self:
        """Return a thread that serves the bundle of these settings."""

        def load() -> Scheduler:
            options: dict[str, Any] = {"chat_template": settings.chat_template, "stage_cores": settings.stage_cores}
            options |= {"stage_timeout": settings.timeout, "memory": memory}
            outrider = LoadedBundle.load(settings.bundle, device=settings.device, slots=None, **options)
            waiting, k, drafter, share = settings.max_waiting, settings.k, settings.drafter, settings.share_prefixes
            return Scheduler(outrider, max_waiting=waiting, k=k, drafter=drafter, share_prefixes=share)

        return cls(settings.bundle, load, Metrics(), settings.timeout)

    def start(self) -> None:
        """Start the thread. It loads the bundle first."""
        self._thread.start()

    def stop(self) -> None:
        """Fail all unfinished requests, and wait for the thread. A thread that is still loading ends with the process."""
        self.end()
        if self.running is not None:
            self._thread.join(timeout=30)
        self.workers.close()

    def end(self) -> None:
        """Fail all unfinished requests with an error that asks the client to retry, and refuse new ones."""
        self._ending = True
        self._inbox.put(lambda: None)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler.

        Raises:
            NotReadyError: the bundle is still loading, or its engines are broken.
        """
        if (failure := self.failure) is not None:  # another thread may clear it
            raise NotReadyError(f"the bundle cannot be run: {failure}", failure.hint)
        if self.running is None:
            raise NotReadyError("the bundle is still loading", "try again later")
        return self.running

    @property
    def outrider(self) -> LoadedBundle:
        """The loaded bundle.

        Raises:
            NotReadyError: see `scheduler`.
        """
        return self.scheduler.bundle

    def turn(self, turns: Turns, owner: Hashable) -> AbstractAsyncContextManager[None]:
        """Return an owner's turn to prepare a request, which is not queued yet; see `Turns.of`.

        Raises:
            NotReadyError: see `scheduler`.
        """
        return turns.of(owner, self.scheduler.places, self.scheduler.waiting())

    def check(self) -> None:
        """Check that the engines work.

        Raises:
            NotReadyError: see `scheduler`; or a step has taken longer than the timeout.
        """
        _ = self.scheduler  # raises
        if (started := self._step_started) is not None and time.perf_counter() - started > self._timeout:
            raise NotReadyError("an engine step has hung", "restart the server")

    async def submit(
        self,
        requests: Sequence[tuple[list[int], SamplingParams]],
        deliver: Callable[[int, Result], None],
        shown: Mapping[int, str] = NONE_SHOWN,
        owner: Hashable = None,
        priority: int = 0,
        timeout: float | None = None,
        waited: float = 0.0,
    ) -> list[Request]:
        """Queue all of the requests, or none.

        Args:
            requests: token ids and parameters of each.
            deliver: called in the event loop with the index of a request and each of its results. The last result is an error,
                or an event with a finish reason.
            shown, owner, priority: see `Scheduler.submit_all`.
            timeout: seconds until the last token, if less than the server's timeout.
            waited: seconds of the timeout that have already passed.

        Raises:
            UsageError: a request cannot be answered.
            QueueFullError: too many requests are waiting.
            NotReadyError: see `scheduler`; or the server is shutting down.
        """
        _ = self.scheduler  # raises
        if self._ending:
            raise _shutting_down()
        loop, limit = asyncio.get_running_loop(), min(self._timeout, timeout or self._timeout)
        accepted: asyncio.Future[list[Request]] = loop.create_future()
        deadline, respond = time.perf_counter() + limit - waited, partial(call_soon, loop, settle, accepted)
        deliveries = [Delivery(partial(call_soon, loop, deliver, index), limit, deadline) for index in range(len(requests))]
        self._inbox.put(partial(self._submit, requests, owner, priority, shown, deliveries, respond))
        try:
            _ = self.scheduler  # raises: the thread may have begun to replace stages, and would make the call late
            return await asyncio.shield(accepted)
        except (asyncio.CancelledError, NotReadyError):  # the client has disconnected, or must not wait
            accepted.add_done_callback(self._abandon)
            raise

    def _abandon(self, accepted: asyncio.Future[list[Request]]) -> None:
        if accepted.exception() is None:
            self.cancel(accepted.result())

    def cancel(self, requests: Sequence[Request]) -> None:
        """Drop requests; their slots are free before the next round."""
        self._inbox.put(partial(self.cancel_now, requests))

    # --- in the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            watch = FolderWatch(self._bundle)
            scheduler = self._load()
            if watch.replaced():
                raise FolderError(f"{self._bundle} was replaced while it was being loaded", "restart the server")
            warm_up(scheduler)
            outrider, end_ids = scheduler.bundle, scheduler.bundle.manifest.generation.eos_token_ids
            self.workers.start(outrider.text, outrider.vocab_rows, end_ids)
            outrider.grammars = self.grammars = RemoteGrammars(self.workers, outrider.vocab_rows, end_ids)
            self.running, self._watchdog = scheduler, Watchdog(scheduler)
            self.metrics.stepped(scheduler.load)
            LOGGER.info("ready")
        except OutriderError as error:
            self.failure = error
            LOGGER.error("the bundle could not be loaded", extra={"error": str(error), "hint": error.hint})
            return
        except BaseException as error:  # a bug, or a panic of a library in Rust; /health reports it
            self.failure = bug(error)
            LOGGER.exception("the bundle could not be loaded")
            return
        finally:
            self.loaded.set()
        while not self._ending:
            try:
                self._turn(scheduler, watch)
            except BaseException as error:  # a bug must not end the server: fail the requests that have a slot, and continue
                LOGGER.exception("a step failed")
                self._recover(scheduler, bug(error))
        self._fail_all(_shutting_down())
        self.running, self.failure = None, _shutting_down()
        self.take_calls(wait=False)  # refuses the requests that were submitted in the meantime
        watch.close()

    def _turn(self, scheduler: Scheduler, watch: FolderWatch) -> None:
        """Make the calls in the inbox, then run one step."""
        self._step_started = None
        self.take_calls(not scheduler.busy and not self._ending, LOOKING if scheduler.bundle.engines.elsewhere else None)
        if scheduler.busy and not self._ending:
            self._step_started = time.perf_counter()
            self._step(scheduler, watch)
        else:
            self.metrics.stepped(scheduler.load)
            look_for_lost_stages(scheduler)  # with one, it is busy

    def take_calls(self, wait: bool, seconds: float | None = None) -> None:
        with suppress(queue.Empty):
            self._inbox.get(block=wait, timeout=seconds)()
            while True:
                self._inbox.get_nowait()()

    def _step(self, scheduler: Scheduler, watch: FolderWatch) -> None:
        results = scheduler.step()
        if (changed := watch.changed()) is not None:  # weights may be mapped from that file, so these results may be wrong
            self._break(EngineError(f"{changed} was changed under the running server", "restart it on an intact bundle"))
            return
        if not self._replaced and watch.replaced():
            self._replaced = True
            LOGGER.warning("the bundle was replaced; this server keeps using the old one until it is restarted")
        self.deliveries.deliver(results, scheduler.load)
        overdue = self.deliveries.overdue()
        for request, _ in overdue:
            scheduler.cancel(request)
        self.deliveries.deliver(overdue, scheduler.load)
        if (lost := lost_stage(results) or scheduler.lost) is not None:
            self._replace_stages(scheduler, lost)
        elif (error := self._watchdog.stepped(results)) is not None:
            self._break(error)

    def _recover(self, scheduler: Scheduler, error: OutriderError) -> None:
        """Fail the requests that have a slot, after a step that raised an exception."""
        running = [request for request in self.deliveries if request.running]
        fatal = self._watchdog.crashed(error, bool(running))
        self.deliveries.deliver([(request, fatal or error) for request in running], scheduler.load)
        if fatal is not None:
            self._break(fatal)

    def _break(self, error: OutriderError) -> None:
        """Stop using the engines. /health reports the error from now on, so that an orchestrator restarts the server."""
        self.failure = error
        LOGGER.error("the engines cannot be used any more", extra={"error": str(error)})
        self._fail_all(error)

    def _replace_stages(self, scheduler: Scheduler, error: StageError) -> None:
        """Fail all requests, because the caches are lost with a stage, and refuse others until new stages are connected."""
        self._break(error)
        self.running = self._step_started = None  # as while loading: nobody waits for this thread to end
        self.take_calls(wait=False)  # refuses the requests that were submitted in the meantime
        for again in replace_stages(scheduler):
            self.failure = again
            self.take_calls(wait=False)
            if self._ending:
                break
        self.running, self.failure, self._watchdog = scheduler, None, Watchdog(scheduler)

    def _submit(
        self,
        requests: Sequence[tuple[list[int], SamplingParams]],
        owner: Hashable,
        priority: int,
        shown: Mapping[int, str],
        deliveries: Sequence[Delivery],
        respond: Callable[[list[Request] | OutriderError], None],
    ) -> None:
        try:
            accepted = self.scheduler.submit_all(requests, owner, priority, shown)
        except OutriderError as error:
            respond(error)
        except Exception as error:  # a bug must end this request, not the thread
            LOGGER.exception("a request could not be queued")
            respond(bug(error))
        else:
            self.deliveries.add(accepted, deliveries)
            respond(accepted)
            full = QueueFullError("the queue is full, and others have fewer requests in it", "try again later")
            while self.scheduler.displaced:
                self.deliveries.deliver([(self.scheduler.displaced.pop(), full)], self.scheduler.load)

    def cancel_now(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if self.running is not None and self.deliveries.cancel(request):
                self.running.cancel(request)

    def _fail_all(self, error: OutriderError) -> None:
        assert self.running is not None
        for request in self.deliveries:
            self.running.cancel(request)
        self.deliveries.deliver([(request, error) for request in self.deliveries], self.running.load)


def _shutting_down() -> NotReadyError:
    return NotReadyError("the server is shutting down", "try again later")
