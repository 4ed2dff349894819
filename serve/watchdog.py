"""Distinguishes broken engines from requests that fail."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from outrider.errors import EngineError, OutriderError
from outrider.runtime.params import SamplingParams
from outrider.runtime.request import Event, Request
from outrider.runtime.request_queue import QueueFullError
from outrider.runtime.scheduler import Scheduler

WARMUP = ([0, 0], SamplingParams(max_new_tokens=4, memory=False))  # a prompt to read, and rounds
MAX_FAILED_STEPS = 3  # consecutive failures after which the probe is submitted


class Watchdog:
    """Counts consecutive failed steps. After a few it submits a probe, which is a request that worked at startup."""

    def __init__(self, scheduler: Scheduler):
        """Watch a scheduler that has answered the probe once."""
        self._scheduler = scheduler
        self._failed_steps = 0
        self._probe: Request | None = None

    def stepped(self, results: Sequence[tuple[Request, Event | OutriderError]]) -> OutriderError | None:
        """Record a step's results. Return the probe's error if the engines are broken."""
        errors = {request: result for request, result in results if isinstance(result, OutriderError)}
        if len(errors) < len(results):
            self._failed_steps, self._probe = 0, None
        elif self._probe in errors:
            return errors[self._probe]
        elif errors:
            self._count_failure()
        return None

    def crashed(self, error: OutriderError, others_running: bool) -> OutriderError | None:
        """Reset the scheduler after a step that raised `error`. Return an error if the engines are broken.

        They are broken if the probe ran alone; otherwise another request may be at fault.
        """
        alone = self._probe is not None and self._probe.running and not others_running
        self._probe = None
        try:
            self._scheduler.reset()
        except Exception as second:
            return bug(second)
        if alone:
            return error
        self._count_failure()
        return None

    def _count_failure(self) -> None:
        self._failed_steps += 1
        if self._failed_steps >= MAX_FAILED_STEPS and self._probe is None:
            with suppress(QueueFullError):  # the next failure tries again
                self._probe = self._scheduler.submit(*WARMUP)


def warm_up(scheduler: Scheduler) -> None:
    """Answer the probe, so that the first request does not pay for one-time setup.

    Raises:
        OutriderError: the engines do not work.
    """
    scheduler.submit(*WARMUP)
    while scheduler.busy:
        for _, result in scheduler.step():
            if isinstance(result, OutriderError):
                raise result


def bug(error: BaseException) -> EngineError:
    """Return an error for an unexpected exception."""
    return EngineError(f"{type(error).__name__}: {error}", "please report this as a bug")
