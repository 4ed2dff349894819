"""The one thread that runs the engines, and how the server's event loop asks it for answers."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from outrider.bundle.folder import FolderWatch
from outrider.errors import EngineError, OutriderError
from outrider.runtime.generation import Event
from outrider.runtime.params import SamplingParams
from outrider.runtime.scheduler import Job, QueueFullError, Scheduler
from outrider.serve.metrics import Metrics

WARM = ([0, 0], SamplingParams(max_new_tokens=4))  # a prompt to read, and rounds
LOST = 3  # steps in a row of which nothing came, after which the engines are asked whether they still run
LOGGER = logging.getLogger("outrider.serve")

Deliver = Callable[[Event | OutriderError], None]
Request = tuple[list[int], SamplingParams, Deliver]
"""Token ids, parameters, and who is told what comes of it."""


class NotReadyError(OutriderError):
    """The bundle is being loaded, or could not be; or the server is ending."""


class TimedOutError(OutriderError):
    """The answer took longer than answers may."""


class Ticket:
    """A request as the event loop knows it; `job` is the thread's."""

    def __init__(self, deliver: Deliver):
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self.job: Job | None = None
        self.cancelled = False
        self.first: float | None = None  # when its first token came, by the scheduler's clock

    def deliver(self, result: Event | OutriderError) -> None:
        """From the thread."""
        _call(self._loop, lambda: self._deliver(result))


class Worker:
    """Loads a bundle, and steps its scheduler for as long as there is something to do."""

    def __init__(self, bundle: Path, load: Callable[[], Scheduler], metrics: Metrics, timeout: float):
        """`load` loads the bundle; `timeout` is in seconds, from a request's submission to its last token."""
        self._bundle, self._load = bundle, load
        self._metrics = metrics
        self._timeout = timeout
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._tickets: dict[int, Ticket] = {}  # of the thread, by the job's id
        self._thread = threading.Thread(target=self._run, name="engines", daemon=True)
        self._ending = False
        self._lost = 0
        self._probe: Job | None = None  # a text that is known to run, among the requests
        self._scheduler: Scheduler | None = None
        self.failure: OutriderError | None = None  # why there is none
        self.loaded = threading.Event()  # that it is ready, or has failed
        self._stepping: float | None = None  # since when the engines run a step

    def start(self) -> None:
        """Load the bundle, in the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Fail whatever still runs, and end the thread; one that is still loading is left to the end of the process."""
        self.end()
        if self._scheduler is not None:
            self._thread.join(timeout=30)

    def end(self) -> None:
        """Fail whatever still runs with what tells its client to try again; nothing more is taken."""
        self._ending = True
        self._inbox.put(lambda: None)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler.

        Raises:
            NotReadyError: the bundle is not loaded and warm yet, or its engines are broken.
        """
        if self.failure is not None:
            raise NotReadyError(f"the bundle cannot be run: {self.failure}", self.failure.hint)
        if self._scheduler is None:
            raise NotReadyError("the bundle is being loaded", "try again later")
        return self._scheduler

    def check(self) -> None:
        """Say whether it works.

        Raises:
            NotReadyError: it is not loaded, is broken, or has not come back from the engines for as long as answers may take.
        """
        assert self.scheduler is not None
        since = self._stepping
        if since is not None and time.perf_counter() - since > self._timeout:
            raise NotReadyError("the engines do not come back", "restart the server")

    async def submit(self, requests: Sequence[Request]) -> list[Ticket]:
        """Queue requests, all or none; what comes of each is given to its `deliver`, in the event loop, up to the event with
        a finish reason or an error.

        Raises:
            UsageError, QueueFullError, NotReadyError: they are not queued.
        """
        assert self.scheduler is not None
        if self._ending:
            raise NotReadyError("the server is ending", "try again")
        loop = asyncio.get_running_loop()
        accepted: asyncio.Future[None] = loop.create_future()
        tickets = [Ticket(deliver) for *_, deliver in requests]

        def settle(error: OutriderError | None) -> None:
            if not accepted.done():
                accepted.set_exception(error) if error is not None else accepted.set_result(None)

        def submit() -> None:
            error: OutriderError | None = None
            try:
                self._submit(tickets, requests)
            except OutriderError as refused:
                error = refused
            except Exception as defect:  # it is this request's end, and not the thread's
                LOGGER.exception("a request could not be queued")
                error = _defect(defect)
            _call(loop, lambda: settle(error))

        self._inbox.put(submit)
        try:
            await accepted
        except asyncio.CancelledError:  # the client went away meanwhile
            for ticket in tickets:
                self.cancel(ticket)
            raise
        return tickets

    def cancel(self, ticket: Ticket) -> None:
        """Drop a request; its slot is free before the next round."""
        ticket.cancelled = True
        self._inbox.put(lambda: self._cancel(ticket))

    # --- in the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            files = FolderWatch(self._bundle)
            scheduler = self._load()
            _warm(scheduler)
            self._scheduler = scheduler
            LOGGER.info("ready")
        except OutriderError as error:
            self.failure = error
            LOGGER.error("the bundle could not be loaded", extra={"error": str(error), "hint": error.hint})
            return
        except Exception as error:  # a defect; said by /health, and not in silence
            self.failure = _defect(error)
            LOGGER.exception("the bundle could not be loaded")
            return
        finally:
            self.loaded.set()
        while True:
            self._stepping = None
            try:
                self._take_in(wait=not scheduler.busy and not self._ending)
                if self._ending:
                    self._fail_all(NotReadyError("the server is ending", "try again"))
                    self._scheduler, self.failure = None, NotReadyError("the server is ending", "try again")
                    self._take_in(wait=False)  # who came meanwhile is refused
                    files.close()
                    return
                if scheduler.busy:
                    self._stepping = time.perf_counter()
                    self._step(scheduler, files)
                self._metrics.stepped(scheduler.load)
            except Exception as error:  # a defect must not end the server: who has a slot is told, and the next begin anew
                LOGGER.exception("a step failed")
                self._recover(scheduler, _defect(error))

    def _step(self, scheduler: Scheduler, files: FolderWatch) -> None:
        results = scheduler.step()
        if (
            changed := files.changed()
        ) is not None:  # weights may be read from there, so nothing of this step is to be believed
            self.failure = EngineError(f"{changed} was changed under the running server", "restart it on a whole bundle")
            LOGGER.error("the bundle was changed", extra={"file": changed})
            self._fail_all(self.failure)
            return
        for job, result in results:
            self._answer(job, result)
        self._time_out(scheduler)
        errors = {id(job): result for job, result in results if isinstance(result, OutriderError)}
        if len(errors) < len(results):
            self._lost, self._probe = 0, None
        elif id(self._probe) in errors:
            self._give_up(errors[id(self._probe)])
        elif errors:
            self._lose(scheduler)

    def _recover(self, scheduler: Scheduler, error: OutriderError) -> None:
        running = [ticket for ticket in self._tickets.values() if ticket.job is not None and ticket.job.text is not None]
        broken = self._probe is not None and self._probe.text is not None and not running  # else it may be another's fault
        self._probe = None
        try:
            scheduler.reset()
        except Exception as again:
            error, broken = _defect(again), True
        for ticket in running:
            if ticket.job is not None:
                self._answer(ticket.job, error)
        self._metrics.stepped(scheduler.load)
        if broken:
            self._give_up(error)
        else:
            self._lose(scheduler)

    def _lose(self, scheduler: Scheduler) -> None:
        """Another step of which nothing came: the requests' fault, or the engines'. A text that once ran will say."""
        self._lost += 1
        if self._lost >= LOST and self._probe is None:
            with suppress(QueueFullError):  # then after the next one
                self._probe = scheduler.submit(*WARM)

    def _give_up(self, error: OutriderError) -> None:
        self.failure = error  # /health says so from now on, for who restarts servers
        LOGGER.error("the engines are taken for broken", extra={"error": str(error)})
        self._fail_all(error)

    def _take_in(self, wait: bool) -> None:
        try:
            self._inbox.get(block=wait)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            pass

    def _submit(self, tickets: list[Ticket], requests: Sequence[Request]) -> None:
        if any(ticket.cancelled for ticket in tickets):
            return
        jobs = self.scheduler.submit_all([(prompt, params) for prompt, params, _ in requests])
        for ticket, job in zip(tickets, jobs, strict=True):
            ticket.job = job
            self._tickets[id(job)] = ticket

    def _cancel(self, ticket: Ticket) -> None:
        job = ticket.job
        if job is not None and self._tickets.pop(id(job), None) is not None and self._scheduler is not None:
            self._scheduler.cancel(job)
            self._metrics.ended(job, "cancelled", time.perf_counter())

    def _answer(self, job: Job, result: Event | OutriderError) -> None:
        ticket, now = self._tickets.get(id(job)), time.perf_counter()
        if ticket is None:
            return
        if isinstance(result, OutriderError):
            self._metrics.ended(job, "error", now)
        elif ticket.first is None:
            ticket.first = now
            self._metrics.began(job, now)
        if not isinstance(result, OutriderError) and result.finish_reason is not None:
            self._metrics.ended(job, result.finish_reason, now, ticket.first)
        if isinstance(result, OutriderError) or result.finish_reason is not None:
            del self._tickets[id(job)]
        ticket.deliver(result)

    def _time_out(self, scheduler: Scheduler) -> None:
        late = time.perf_counter() - self._timeout
        for ticket in [each for each in self._tickets.values() if each.job is not None and each.job.submitted < late]:
            assert ticket.job is not None
            scheduler.cancel(ticket.job)
            error = TimedOutError(f"the answer took longer than {self._timeout:g} seconds", "ask for fewer tokens")
            self._answer(ticket.job, error)

    def _fail_all(self, error: OutriderError) -> None:
        for ticket in list(self._tickets.values()):
            assert ticket.job is not None
            if self._scheduler is not None:
                self._scheduler.cancel(ticket.job)
            self._answer(ticket.job, error)


def _defect(error: Exception) -> EngineError:
    return EngineError(f"{type(error).__name__}: {error}", "report it, please")


def _call(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:  # the server has ended; no one is listening
        LOGGER.debug("a result came after the server had ended")


def _warm(scheduler: Scheduler) -> None:
    """One short answer, so that the first request does not pay for what is made once."""
    scheduler.submit(*WARM)
    while scheduler.busy:
        for _, result in scheduler.step():
            if isinstance(result, OutriderError):
                raise result
