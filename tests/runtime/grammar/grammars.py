"""Grammars of several kinds, and answers under them."""

from __future__ import annotations

from typing import Any

from outrider.runtime.generation import Event, Outrider
from outrider.runtime.grammar.structured import StructuredOutputs
from outrider.runtime.params import SamplingParams
from outrider.tests.runtime.policies import policy_at_random

K = (1, 2, 4, 8)
PROMPT = "Customer: Hi, I would like to order a coffee.\nAgent:"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "size": {"enum": ["small", "medium", "large"]},
        "price": {"type": "integer", "minimum": 1, "maximum": 99},
        "extras": {"type": "array", "items": {"enum": ["milk", "sugar"]}, "maxItems": 3},
        "address": {"type": "object", "properties": {"street": {"type": "string", "maxLength": 12}}, "required": ["street"]},
    },
    "required": ["name", "size", "price", "extras", "address"],
    "additionalProperties": False,
}
SUM = 'start: term (OPERATOR term)*\nterm: /[0-9]{1,3}/ | "(" start ")"\nOPERATOR: " + " | " - "\n'
GRAMMARS: dict[str, StructuredOutputs] = {
    "forces": StructuredOutputs(choice=[" Of course, what would you like to drink today, and where shall I bring it?"]),
    "branches": StructuredOutputs(choice=[" yes please", " not at all", " maybe so", " yes, of course I can do that for you"]),
    "forbids": StructuredOutputs(regex="[^e]{20,80}"),
    "multi-byte": StructuredOutputs(regex="(naïve|café|中文|🙂){3,5}"),
    "schema": StructuredOutputs(json=SCHEMA),
    "object": StructuredOutputs(json_object=True),
    "grammar": StructuredOutputs(grammar=SUM),
    "gbnf": StructuredOutputs(grammar='root ::= item ("," item)*\nitem ::= "apple" | "pear" | "plum"'),
}
NOTHING = "NOTHING: /x/ & /y/"  # what follows this rule cannot be reached, which llguidance finds when it is there


def run(outrider: Outrider, name: str, k: int | str, **params: Any) -> list[Event]:
    chosen = SamplingParams(max_new_tokens=90, structured_outputs=GRAMMARS[name], **params)
    if k == "at random":
        with policy_at_random(outrider):
            return list(outrider.generate(PROMPT, chosen))
    if k == "ngram":
        return list(outrider.generate(PROMPT, chosen, k=K[-1], drafter="ngram"))
    return list(outrider.generate(PROMPT, chosen, k=k))


def tokens(events: list[Event]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def text(events: list[Event]) -> str:
    return "".join(event.text for event in events)
