"""Requests that arrive in turns, and are served until they end."""

from __future__ import annotations

from dataclasses import replace

from outrider.errors import OutriderError
from outrider.runtime.params import SamplingParams
from outrider.runtime.request import Request
from outrider.runtime.scheduler import Scheduler

PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.8, top_p=0.9, seed=6, repetition_penalty=1.2),
]
Asked = tuple[int, int, int | None]
"""The text, the parameters, and after how many steps the request is cancelled."""


def serve(
    scheduler: Scheduler, texts: list[list[int]], arrivals: dict[int, list[Asked]]
) -> list[tuple[Request, Asked, list[int]]]:
    """Run requests that arrive at the given steps, until all are done."""
    served: list[tuple[Request, Asked, list[int]]] = []
    begun: dict[Request, int] = {}
    step = 0
    while step <= max(arrivals) or scheduler.busy:
        for asked in arrivals.get(step, []):
            text, params, _ = asked
            request = scheduler.submit(texts[text], replace(PARAMS[params], max_new_tokens=10 + 3 * (text % 5)))
            begun[request] = step
            served.append((request, asked, []))
        for request, (_, _, cancelled), _ in served:
            if cancelled is not None and step == begun[request] + cancelled:
                scheduler.cancel(request)
        for request, event in scheduler.step():
            if isinstance(event, OutriderError):
                raise event
            next(got for each, _, got in served if each is request).extend(event.token_ids)
        step += 1
    return served


def run(scheduler: Scheduler, *requests: Request) -> None:
    """Run until these have ended."""
    while any(request.finish_reason is None for request in requests):
        scheduler.step()
