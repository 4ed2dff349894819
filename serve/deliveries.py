"""Delivers the results of requests, and finds requests that have timed out."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.errors import OutriderError
from outrider.runtime.request import Event, Request
from outrider.runtime.stats import Load
from outrider.serve.metrics import Metrics

LATE = 1.0  # seconds after a request's time limit in which a step of the engines may end, after which they fail it
Result = Event | OutriderError
LOGGER = logging.getLogger("outrider.serve")


class TimedOutError(OutriderError):
    """The answer took longer than the server's timeout."""


@dataclass(slots=True)
class Delivery:
    """Where the results of a request go."""

    sink: Callable[[Result], None]
    seconds: float = math.inf  # the request's time limit
    deadline: float = math.inf  # by `time.perf_counter`
    first_token: float | None = None  # when it was sent, by `time.perf_counter`


class Deliveries:
    """The requests that have been submitted and have not ended. Results that come after a request's end are dropped."""

    def __init__(self, metrics: Metrics):
        """Start empty. `metrics` counts the first token and the end of each request."""
        self._metrics = metrics
        self._open: dict[Request, Delivery] = {}

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._open))

    def add(self, requests: Sequence[Request], deliveries: Sequence[Delivery]) -> None:
        """Add requests, each with its delivery."""
        self._open |= zip(requests, deliveries, strict=True)

    def deliver(self, results: Iterable[tuple[Request, Result]], load: Load) -> None:
        """Pass on results; `load` is the load after them. Clients may look at the metrics at once, so these are set first."""
        self._metrics.stepped(load)
        for request, result in results:
            self._deliver(request, result)

    def _deliver(self, request: Request, result: Result) -> None:
        if (delivery := self._open.get(request)) is None:
            return
        now = time.perf_counter()
        if isinstance(result, OutriderError):
            self._end(request, "error", now)
        else:
            if delivery.first_token is None:
                delivery.first_token = now
                self._metrics.began(request, now)
            if result.finish_reason is not None:
                self._end(request, result.finish_reason, now)
        delivery.sink(result)

    def cancel(self, request: Request) -> bool:
        """Drop a request. Return False if it has already ended."""
        if request not in self._open:
            return False
        self._end(request, "cancelled", time.perf_counter())
        return True

    def _end(self, request: Request, reason: str, now: float) -> None:
        delivery = self._open.pop(request)
        self._metrics.ended(request, reason, now, delivery.first_token if reason not in ("error", "cancelled") else None)

    def overdue(self) -> list[tuple[Request, TimedOutError]]:
        """Return the requests that have timed out, each with its error."""
        now = time.perf_counter()
        return [
            (request, timed_out(delivery.seconds, "ask for fewer tokens"))
            for request, delivery in self._open.items()
            if now > delivery.deadline
        ]


def timed_out(seconds: float, hint: str) -> TimedOutError:
    """Return the error of a request with this time limit."""
    return TimedOutError(f"the answer took longer than {seconds:g} seconds", hint)


def settle(accepted: asyncio.Future[list[Request]], result: list[Request] | OutriderError) -> None:
    """End the wait for requests to be queued."""
    if isinstance(result, OutriderError):
        accepted.set_exception(result)
    else:
        accepted.set_result(result)


def call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *arguments: Any) -> None:
    """Call a function in an event loop, from another thread."""
    try:
        loop.call_soon_threadsafe(callback, *arguments)
    except RuntimeError:  # the loop is closed, so nobody needs the result
        LOGGER.debug("a result arrived after the server had shut down")
