"""Requests that come and go, and what each must get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from outrider.runtime.generation import Event
from outrider.runtime.params import SamplingParams
from outrider.runtime.request import Request
from outrider.runtime.scheduler import Scheduler

SLOTS = 4
CAPACITY = 159  # with the spare position, so that a slot's cache begins at an aligned address
PROMPTS = [
    "Customer: Hi, I would like to order a coffee.\nAgent:",
    "Once upon a time there was a little",
    "T",
    "The old man walked along the road, and the dog ran on before him. " * 4,
    "Question: Tom has 5 apples. How many",
    *(
        "The old man walked along the road, and the dog ran on before him. " * times + end
        for times, end in ((3, "Then"), (4, "But"))
    ),
]
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.8, top_p=0.9, seed=6, repetition_penalty=1.2, logit_bias={7: 3.0, 9: -100.0}),
    SamplingParams(temperature=1.0, top_k=5, seed=7, logprobs=2),
    SamplingParams(frequency_penalty=0.5, min_new_tokens=5),
]
Alone = Callable[[int, int], list[int]]
SLOW = [pytest.param(f"{backend} fp32", marks=pytest.mark.slow) for backend in ("onnxruntime", "openvino")]
Arrival = tuple[int, int, int, int, int | None]
"""At which step, which prompt and parameters, how many tokens, and after how many steps it is cancelled."""


def play(scheduler: Scheduler, arrivals: list[Arrival]) -> list[tuple[Arrival, Request, list[Event]]]:
    """Run requests that come and go as the schedule says, until all are done."""
    encode = scheduler.bundle.text.encode
    came: list[tuple[Arrival, Request, list[Event]]] = []
    left = sorted(arrivals, key=lambda each: each[0])
    step = 0
    while left or scheduler.busy:
        while left and left[0][0] <= step:
            arrival = left.pop(0)
            params = replace(PARAMS[arrival[2]], max_new_tokens=arrival[3])
            came.append((arrival, scheduler.submit(encode(PROMPTS[arrival[1]], chat=False), params), []))
        for arrival, request, _ in came:
            if arrival[4] is not None and step == arrival[0] + arrival[4]:
                scheduler.cancel(request)
        for request, event in scheduler.step():
            assert isinstance(event, Event)
            arrival, _, events = next(each for each in came if each[1] is request)
            assert arrival[4] is None or step < arrival[0] + arrival[4]
            events.append(event)
        step += 1
        assert step < 1000
    assert scheduler.load.running == scheduler.load.waiting == 0
    assert scheduler.load.used == 0
    return came


def check(came: list[tuple[Arrival, Request, list[Event]]], alone: Alone) -> None:
    for (_, prompt, params, limit, stop), request, events in came:
        got = [token for event in events for token in event.token_ids]
        assert got == alone(prompt, params)[: len(got)]
        if stop is None or request.finish_reason is not None:
            assert len(got) == limit
            assert events[-1].finish_reason == "length"
        stats = request.stats
        assert stats.unexamined >= 0
        assert stats.emitted == stats.accepted + stats.own == len(got)
