"""Structured output through the HTTP API: a real server, and the official client."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from outrider.runtime.generation import Outrider
from outrider.runtime.grammar.structured import StructuredOutputs
from outrider.runtime.params import SamplingParams
from outrider.tests.serve.server import Reached, serving_here

PROMPT = "Customer: Hi, I would like to order a coffee.\nAgent:"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "drink": {"enum": ["coffee", "tea"]},
        "milk": {"type": "boolean"},
        "note": {"type": "string", "maxLength": 15},
    },
    "required": ["drink", "milk", "note"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Reached]:
    with serving_here(bundle) as server:
        yield server


def plain(outrider: Outrider, prompt: str, structured: StructuredOutputs, **params: Any) -> str:
    chosen = SamplingParams(structured_outputs=structured, **params)
    return "".join(event.text for event in outrider.generate(prompt, chosen, k=0))


def json_schema(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "order", "schema": schema, "strict": True}}


def ask(client: openai.OpenAI, **asked: Any) -> Any:
    messages: Any = [{"role": "user", "content": "Hi, I would like to order a coffee."}]
    return client.chat.completions.create(model="target", messages=messages, **{"temperature": 0, "max_tokens": 100, **asked})


def test_an_answer_follows_its_schema_and_is_plain_decodings(client: openai.OpenAI, alone: Outrider) -> None:
    answer = ask(client, response_format=json_schema(SCHEMA)).choices[0]
    jsonschema.validate(json.loads(answer.message.content), SCHEMA)
    assert answer.finish_reason == "stop"
    assert answer.message.content == plain(alone, PROMPT, StructuredOutputs(json=SCHEMA), max_new_tokens=100)


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    chunks = ask(client, response_format=json_schema(SCHEMA), stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == ask(client, response_format=json_schema(SCHEMA)).choices[0].message.content


def test_the_clients_own_parser_reads_an_answer(client: openai.OpenAI) -> None:
    import pydantic

    class Order(pydantic.BaseModel):
        drink: str = pydantic.Field(max_length=12)
        milk: bool

    messages: Any = [{"role": "user", "content": "Tea, please."}]
    # Random: a character may take ten tokens.
    answer = client.chat.completions.parse(model="target", messages=messages, response_format=Order, max_tokens=300)
    assert isinstance(answer.choices[0].message.parsed, Order)


FORMS: dict[str, tuple[dict[str, Any], StructuredOutputs]] = {
    "regex": ({"structured_outputs": {"regex": "[a-d ]{5,20}"}}, StructuredOutputs(regex="[a-d ]{5,20}")),
    "choice": ({"structured_outputs": {"choice": [" yes", " no"]}}, StructuredOutputs(choice=[" yes", " no"])),
    "json": ({"structured_outputs": {"json": SCHEMA}}, StructuredOutputs(json=SCHEMA)),
    "json in text": ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, StructuredOutputs(json=SCHEMA)),
    "object": ({"structured_outputs": {"json_object": True}}, StructuredOutputs(json_object=True)),
    "an empty regex": ({"structured_outputs": {"regex": ""}}, StructuredOutputs(regex="")),
    "grammar": ({"structured_outputs": {"grammar": 'start: "a" | "b"'}}, StructuredOutputs(grammar='start: "a" | "b"')),
    "grammar behind lines": (
        {"structured_outputs": {"grammar": "\n" * 200_000 + 'root ::= "a" | "b"'}},
        StructuredOutputs(grammar='root ::= "a" | "b"'),
    ),
    "guided_json": ({"guided_json": SCHEMA}, StructuredOutputs(json=SCHEMA)),
    "guided_regex": ({"guided_regex": "[0-9]{3}"}, StructuredOutputs(regex="[0-9]{3}")),
    "guided_choice": ({"guided_choice": ["tea", "coffee"]}, StructuredOutputs(choice=["tea", "coffee"])),
    "guided_grammar": ({"guided_grammar": 'root ::= "a" | "b"'}, StructuredOutputs(grammar='root ::= "a" | "b"')),
    "response_format": ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_in_both_endpoints(client: openai.OpenAI, alone: Outrider, form: str) -> None:
    asked, structured = FORMS[form]
    want = plain(alone, PROMPT, structured, max_new_tokens=60)
    assert ask(client, extra_body=asked, max_tokens=60).choices[0].message.content == want
    completion = client.completions.create(model="target", prompt=PROMPT, temperature=0, max_tokens=60, extra_body=asked)
    assert completion.choices[0].text == want


def test_several_choices_are_each_in_the_grammar(client: openai.OpenAI) -> None:
    answer = ask(client, n=4, temperature=1.0, seed=5, extra_body={"structured_outputs": {"regex": "[x-z]{3,6}"}})
    assert [bool(re.fullmatch("[x-z]{3,6}", choice.message.content)) for choice in answer.choices] == [True] * 4


def test_an_answer_that_is_cut_off_says_so(client: openai.OpenAI) -> None:
    answer = ask(client, response_format=json_schema(SCHEMA), max_tokens=5).choices[0]
    assert answer.finish_reason == "length"


def test_logprobs_are_json(client: openai.OpenAI) -> None:
    answer = ask(client, logprobs=True, top_logprobs=10, extra_body={"structured_outputs": {"choice": [" yes", " no"]}})
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries).startswith(answer.choices[0].message.content)
    for entry in entries:
        assert 0 < len(entry.top_logprobs) <= 10
        assert entry.logprob <= 0


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unsupported keyword": (
        {"response_format": json_schema({"type": "object", "unevaluatedProperties": False})},
        "unevaluated",
    ),
    "no schema": ({"response_format": {"type": "json_schema"}}, "json_schema"),
    "a schema with json_object": ({"response_format": {**json_schema(SCHEMA), "type": "json_object"}}, "json_schema"),
    "an unknown type": ({"response_format": {"type": "yaml"}}, "type"),
    "a bad regex": ({"structured_outputs": {"regex": "(a"}}, "regex"),
    "a bad grammar": ({"structured_outputs": {"grammar": "start: nothing"}}, "nothing"),
    "an empty grammar": ({"structured_outputs": {"grammar": ""}}, "'root'"),
    "rules that overflow the stack": (
        {"structured_outputs": {"grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(9000)) + 'r9000: "a"'}},
        "crashed on the grammar",
    ),
    "nothing": ({"structured_outputs": {}}, "0 kinds"),
    "two": ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "2 kinds"),
    "two forms": ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "2 kinds"),
    "one form twice": ({"structured_outputs": {"json": SCHEMA}, "guided_json": {"type": "integer"}}, "2 kinds .*: json, json"),
    "two schemas": ({"response_format": json_schema(SCHEMA), "guided_json": {"type": "integer"}}, "2 kinds .*: json, json"),
    "a minimum length": ({"structured_outputs": {"regex": "a+"}, "min_tokens": 5}, "min_tokens"),
    "too many states": ({"structured_outputs": {"regex": "(a{1000}){1000}b"}}, "complex|longer"),
    "an explosion": (
        {
            "structured_outputs": {
                "grammar": "start: a0\n" + "".join(f'a{i}: a{i + 1} a{i + 1} | "x"\n' for i in range(2000)) + 'a2000: "y"'
            }
        },
        "complex|longer|crashed",
    ),
}


def test_a_grammar_is_tried_for_prompts_of_tokens_too(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"complex|longer"):
        client.completions.create(model="target", prompt=[1, 2, 3], extra_body=REFUSED["too many states"][0])


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_refused(client: openai.OpenAI, case: str) -> None:
    asked, message = REFUSED[case]
    with pytest.raises(openai.BadRequestError, match=message):
        ask(client, extra_body=asked)
    assert ask(client, max_tokens=3).choices[0].message.content  # the server still answers


@pytest.mark.slow  # tests/serve/test_workers.py tries one beside an answer
def test_hostile_grammars_do_not_hold_up_a_stream(client: openai.OpenAI) -> None:
    """While others send what takes long to refuse, the tokens of a stream keep coming."""
    hostile = REFUSED["too many states"][0], REFUSED["an explosion"][0]

    def attack(index: int) -> None:
        with pytest.raises(openai.APIStatusError):
            ask(client, extra_body=hostile[index % 2], user=str(index))

    with ThreadPoolExecutor(4) as pool:
        attacks = [pool.submit(attack, index) for index in range(6)]
        gaps, last = [], time.monotonic()
        for _ in ask(client, stream=True, max_tokens=300):
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
        for each in attacks:
            each.result()
    assert max(gaps[1:]) < 2  # a machine with two cores, on which one compiles


def test_a_deadline_holds_while_a_grammar_is_compiled(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="in time"):
        ask(client, extra_body={"guided_json": {"type": "integer", "multipleOf": 99999989}, "timeout": 1})
