"""Bundles of a target in one piece and in stages, and what is asked of both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.engines.session import Session
from outrider.errors import OutriderError
from outrider.runtime.generation import Outrider
from outrider.runtime.grammar.structured import StructuredOutputs
from outrider.runtime.params import SamplingParams
from outrider.runtime.request import Request
from outrider.runtime.scheduler import Scheduler
from outrider.tests.runtime.serving import Asked, serve
from outrider.tests.support import build

K, SLOTS, CHUNK = (1, 4), 3, 16
CAPACITY = 191  # with the spare position, so that a slot's cache begins at an aligned address
PROMPTS = (
    "Customer: Hi, I would like to order a coffee.\nAgent:",
    "T",
    "naïve café, 中文 and 🙂",
    "The old man walked along the road, and the dog ran on before him. " * 2,
)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=7)
GRAMMARS = (StructuredOutputs(json_object=True), StructuredOutputs(choice=[" yes, of course I can do that", " not at all"]))


def loaded(export: Path, folder: Path, stages: str | None, **options: Any) -> Outrider:
    """A bundle with all of its slots."""
    sizes = {"k": [*K], "capacity": CAPACITY, "batch": SLOTS, "max_prompt_chunk": CHUNK}
    build(export, folder, stages=stages, **sizes, **options)
    return Outrider.load(folder, slots=None)


def alone(outrider: Outrider, k: int | str, drafter: str | None, limit: int) -> list[list[int]]:
    """The answers to single requests, greedy and sampled, free and under grammars."""
    greedy = SamplingParams(max_new_tokens=limit)
    sampled = replace(SAMPLED, max_new_tokens=limit)
    constrained = (replace(each, structured_outputs=grammar) for each, grammar in zip((greedy, sampled), GRAMMARS, strict=True))
    return [
        [token for event in outrider.generate(prompt, params, k=k, drafter=drafter) for token in event.token_ids]
        for params in (greedy, sampled, *constrained)
        for prompt in PROMPTS
    ]


def at_once(outrider: Outrider, k: int | str, limit: int) -> list[list[int]]:
    """The answers to the requests of `alone`, which come at once."""
    params = [SamplingParams(max_new_tokens=limit), replace(SAMPLED, max_new_tokens=limit)]
    params += [replace(each, structured_outputs=grammar) for each, grammar in zip(params, GRAMMARS, strict=True)]
    scheduler, got = Scheduler(outrider, k=k), dict[Request, list[int]]()
    for each in params:
        for prompt in PROMPTS:
            got[scheduler.submit(outrider.text.encode(prompt, chat=False), each)] = []
    while scheduler.busy:
        for request, event in scheduler.step():
            if isinstance(event, OutriderError):
                raise event
            got[request] += event.token_ids
    return [*got.values()]


def together(outrider: Outrider, k: int | str) -> list[list[int]]:
    """The answers to requests that come, go and are cancelled, and have prefixes in common with each other and earlier ones."""
    texts = [outrider.text.encode(prompt, chat=False) for prompt in PROMPTS]
    texts += [texts[3][:40] + texts[0], texts[3] + texts[1], texts[0] + texts[1]]
    arrivals: dict[int, list[Asked]] = {0: [(3, 0, None), (0, 1, None)], 2: [(4, 0, None), (1, 2, 3)], 5: [(2, 1, None)]}
    arrivals |= {9: [(5, 0, None), (6, 2, None), (3, 0, None)]}
    return [tokens for _, (_, _, cancelled), tokens in serve(Scheduler(outrider, k=k), texts, arrivals) if cancelled is None]


def results(session: Session) -> list[npt.NDArray[Any]]:
    """The logits of passes of one row and several, after confirmed rows and rejected ones, and at last the caches."""
    random, found, position = np.random.default_rng(0), list[npt.NDArray[Any]](), 0
    for rows, certain in ((CHUNK, CHUNK), (5, 1), (5, 3), (2, 1), (1, 1), (1, 1)):
        positions = np.full(SLOTS, position)
        found.append(session.run(random.integers(0, 300, (SLOTS, rows)), positions, certain=[certain] * SLOTS).copy())
        position += certain
    session.copy(0, 2, position)
    found.append(session.run(random.integers(0, 300, (1, 3)), np.array([position]), 2).copy())
    session.clear(1)
    found.append(session.run(random.integers(0, 300, (1, 3)), np.array([0]), 1).copy())
    if session.places:
        session.snapshot(0, 1)
        session.run(random.integers(0, 300, (1, 4)), np.array([position]), 0)
        session.restore(1, 0, position)
        found.append(session.run(random.integers(0, 300, (1, 3)), np.array([position]), 0).copy())
    return [*found, *(each.copy() for _, each in sorted(session.cache().items()))]
