"""Answers to one prompt, as events and as tokens."""

from __future__ import annotations

from typing import Any

from outrider.runtime.generation import Event, Outrider
from outrider.runtime.params import SamplingParams

PROMPT = "Customer: Hi, I would like to book a table for two in San Jose."


def events(outrider: Outrider, prompt: str | list[int] = PROMPT, k: int = 0, **params: Any) -> list[Event]:
    return list(outrider.generate(prompt, SamplingParams(**{"max_new_tokens": 60, **params}), k=k))


def ids(outrider: Outrider, prompt: str | list[int] = PROMPT, k: int = 0, **params: Any) -> list[int]:
    return [token for event in events(outrider, prompt, k, **params) for token in event.token_ids]
