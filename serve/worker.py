"""The one thread that runs the engines, and how the server's event loop asks it for answers."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable

from outrider.engines.errors import EngineError, OutriderError
from outrider.runtime.generation import Event
from outrider.runtime.params import SamplingParams
from outrider.runtime.scheduler import Job, Scheduler
from outrider.serve.metrics import Metrics

WARM_TOKENS = 4
LOGGER = logging.getLogger("outrider.serve")


class NotReadyError(OutriderError):
    """The bundle is being loaded, or could not be."""


class TimedOutError(OutriderError):
    """The answer took longer than answers may."""


class Ticket:
    """A request as the event loop knows it; `job` is the thread's."""

    def __init__(self, deliver: Callable[[Event | OutriderError], None]):
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self.accepted: asyncio.Future[None] = self._loop.create_future()
        self.job: Job | None = None
        self.cancelled = False
        self.first: float | None = None  # when its first token came, by the scheduler's clock

    def deliver(self, result: Event | OutriderError) -> None:
        """From the thread."""
        self._call(lambda: self._deliver(result))

    def decide(self, error: OutriderError | None) -> None:
        """From the thread: whether the request is queued."""

        def settle() -> None:
            if not self.accepted.done():
                self.accepted.set_exception(error) if error is not None else self.accepted.set_result(None)

        self._call(settle)

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the server has ended; no one is listening
            LOGGER.debug("a result came after the server had ended")


class Worker:
    """Loads a bundle, and steps its scheduler for as long as there is something to do."""

    def __init__(self, load: Callable[[], Scheduler], metrics: Metrics, timeout: float):
        """`timeout` is in seconds, from a request's submission to its last token."""
        self._load = load
        self._metrics = metrics
        self._timeout = timeout
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._tickets: dict[int, Ticket] = {}  # of the thread, by the job's id
        self._thread = threading.Thread(target=self._run, name="engines", daemon=True)
        self._stopped = False
        self._scheduler: Scheduler | None = None
        self.failure: OutriderError | None = None  # why there is none

    def start(self) -> None:
        """Load the bundle, in the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and with it whatever still runs."""
        self._stopped = True
        self._inbox.put(lambda: None)
        self._thread.join(timeout=30)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler.

        Raises:
            NotReadyError: the bundle is not loaded and warm yet.
        """
        if self._scheduler is None:
            reason = "the bundle is being loaded" if self.failure is None else f"the bundle could not be loaded: {self.failure}"
            raise NotReadyError(reason, "try again later" if self.failure is None else self.failure.mend)
        return self._scheduler

    async def submit(
        self, prompt: list[int], params: SamplingParams, deliver: Callable[[Event | OutriderError], None]
    ) -> Ticket:
        """Queue a request; what comes of it is given to `deliver`, in the event loop, up to the event with a finish reason
        or an error.

        Raises:
            UsageError, QueueFullError, NotReadyError: it is not queued.
        """
        assert self.scheduler is not None
        ticket = Ticket(deliver)
        self._inbox.put(lambda: self._submit(ticket, prompt, params))
        await ticket.accepted
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Drop a request; its slot is free before the next round."""
        ticket.cancelled = True
        self._inbox.put(lambda: self._cancel(ticket))

    # --- in the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            scheduler = self._load()
            _warm(scheduler)
        except OutriderError as error:
            self.failure = error
            LOGGER.error("the bundle could not be loaded", extra={"error": str(error), "mend": error.mend})
            return
        except Exception as error:  # a defect; said in /health, and not in silence
            self.failure = EngineError(f"{type(error).__name__}: {error}", "report it, please")
            LOGGER.exception("the bundle could not be loaded")
            return
        self._scheduler = scheduler
        LOGGER.info("ready")
        while not self._stopped:
            self._take_in(wait=not scheduler.busy)
            if not scheduler.busy:
                continue
            try:
                results = scheduler.step()
            except Exception as error:  # a defect must not end the server: who is here is told, and the next begin anew
                LOGGER.exception("a step failed")
                self._fail_all(EngineError(f"{type(error).__name__}: {error}", "report it, please"))
                continue
            self._metrics.stepped(scheduler.load)
            for job, result in results:
                self._answer(job, result)
            self._time_out(scheduler)

    def _take_in(self, wait: bool) -> None:
        try:
            self._inbox.get(block=wait)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            pass

    def _submit(self, ticket: Ticket, prompt: list[int], params: SamplingParams) -> None:
        if ticket.cancelled:
            return
        try:
            ticket.job = self.scheduler.submit(prompt, params)
        except OutriderError as error:
            ticket.decide(error)
            return
        self._tickets[id(ticket.job)] = ticket
        ticket.decide(None)

    def _cancel(self, ticket: Ticket) -> None:
        job = ticket.job
        if job is not None and self._tickets.pop(id(job), None) is not None:
            self.scheduler.cancel(job)
            self._metrics.ended(job, "cancelled", time.perf_counter())
            self._metrics.stepped(self.scheduler.load)

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
            self.scheduler.cancel(ticket.job)
            self._answer(ticket.job, error)


def _warm(scheduler: Scheduler) -> None:
    """One short answer, so that the first request does not pay for what is made once."""
    scheduler.submit([0], SamplingParams(max_new_tokens=WARM_TOKENS))
    while scheduler.busy:
        for _, result in scheduler.step():
            if isinstance(result, OutriderError):
                raise result
