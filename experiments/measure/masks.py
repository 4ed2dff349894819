"""Measure the time that grammars take in rounds of a bundle.

Generates answers with a JSON Schema, any JSON object, a regular expression and a grammar, plain and in each drafting mode.
Prints how long the host works on the grammar per round (masks, forced tokens, confirmed tokens), and the share of the round.
Values are medians over the repetitions, with minimum and maximum in brackets.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from outrider.bench.report import spread
from outrider.experiments.measure import arguments
from outrider.runtime import drafters
from outrider.runtime.generation import Outrider
from outrider.runtime.grammar.matcher import Matcher
from outrider.runtime.grammar.structured import StructuredOutputs
from outrider.runtime.params import SamplingParams
from outrider.runtime.rounds import rounds

PROMPT = "Describe three towns in England: their names, when they were founded, and what they are known for."
TOWN = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "founded": {"type": "integer"},
        "known_for": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "founded", "known_for"],
}
CASES = {
    "schema": StructuredOutputs(json={"type": "array", "items": TOWN, "minItems": 3, "maxItems": 3}),
    "object": StructuredOutputs(json_object=True),
    "regex": StructuredOutputs(regex=r"([A-Z][a-z]+ was founded in [0-9]{3,4}, and is known for [a-z ,]+\. ){3}"),
    "grammar": StructuredOutputs(
        grammar='start: town+\ntown: "- " NAME " (" YEAR "): " WORDS "\\n"\n'
        "NAME: /[A-Z][a-z]+/\nYEAR: /[0-9]+/\nWORDS: /[a-z ,]+/"
    ),
}


class CallTimer:
    """Adds up the time of calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, owner: Any, name: str) -> None:
        """Replace a function of a module or class by one that adds up its time."""
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self.seconds += time.perf_counter() - started

        setattr(owner, name, timed)


@click.command(help=__doc__)
@arguments.bundle
@arguments.repeat
def command(bundle: Path, repeat: int) -> None:
    outrider, watch = Outrider.load(bundle), CallTimer()
    watch.wrap(rounds, "mask")
    for name in ("forced", "valid", "advance"):
        watch.wrap(Matcher, name)
    on_device = drafters.on_device(outrider.drafters)
    fixed: list[tuple[str, int | str, str | None]] = [(name, outrider.default_k, name) for name in on_device]
    modes = [("plain", 0, None), *fixed, ("auto", "auto", None)]
    chat = outrider.text.template is not None
    for case, structured in CASES.items():
        for mode, k, drafter in modes:
            masks, shares = [], []
            for _ in range(repeat + 1):  # the first run compiles the grammar and fills its caches
                watch.seconds = 0.0
                params = SamplingParams(max_new_tokens=160, structured_outputs=structured)
                for event in outrider.generate(PROMPT, params, k=k, drafter=drafter, chat=chat):
                    stats = event.stats
                masks.append(1000 * watch.seconds / stats.rounds)
                shares.append(100 * watch.seconds / (stats.seconds - stats.prompt_seconds))
            print(f"{case:8} {mode:14} {spread(masks[1:])} ms of a round: {spread(shares[1:])} %")
