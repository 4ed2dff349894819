"""`/v1/responses` as the official client sees it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from outrider.bundle.manifest import CHAT_TEMPLATE
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.serve.api.chat_protocol import ChatRequest
from outrider.serve.api.responses_protocol import ResponsesRequest
from outrider.tests.serve.calls import SCHEMAS, TEMPLATE
from outrider.tests.serve.server import Reached, chat_bundle, fetch, serving_here
from outrider.tests.support import reseal

TOOLS: list[Any] = [{"type": "function", "name": name, "parameters": schema} for name, schema in SCHEMAS.items()]
SCHEMA = SCHEMAS["order"] | {"additionalProperties": False}
HI = "Hi, I would like to order a coffee."


@pytest.fixture(scope="module")
def bundle(trained_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    bundle = chat_bundle(trained_export, tmp_path_factory.mktemp("responses") / "bundle")
    (bundle / CHAT_TEMPLATE).write_text(TEMPLATE)
    reseal(bundle)
    return bundle


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Reached]:
    with serving_here(bundle) as server:
        yield server


def ask(client: openai.OpenAI, **options: Any) -> Any:
    asked: Any = {"model": "target", "input": HI, "temperature": 0, "max_output_tokens": 60}
    return client.responses.create(**(asked | options))


def text_of(bundle: Path, prompt: str, tokens: int) -> str:
    params = SamplingParams(max_new_tokens=tokens)
    return "".join(event.text for event in Outrider.load(bundle).generate(prompt, params, k=0))


def test_text_is_that_of_plain_decoding(client: openai.OpenAI, bundle: Path) -> None:
    want = text_of(bundle, f"Agent: Be brief.\nCustomer: {HI}\nAgent:", 2)
    messages = [{"role": "user", "content": [{"type": "input_text", "text": HI}]}]
    for asked in (HI, messages):
        done = ask(client, input=asked, instructions="Be brief.", max_output_tokens=2)
        assert done.output_text == want
        assert (done.status, done.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (done.usage.output_tokens, done.store, done.instructions) == (2, False, "Be brief.")
        assert done.usage.input_tokens + 2 == done.usage.total_tokens
    done = ask(client, max_output_tokens=None)
    assert (done.status, done.output[0].status, done.incomplete_details) == ("completed", "completed", None)


def test_an_earlier_answer_is_part_of_the_input(client: openai.OpenAI, bundle: Path) -> None:
    first = ask(client)
    again = [{"role": "user", "content": HI}, *first.output, {"role": "user", "content": "Thanks."}]
    done = ask(client, input=again, max_output_tokens=10)
    assert done.output_text == text_of(bundle, f"Customer: {HI}\nAgent: {first.output_text}\nCustomer: Thanks.\nAgent:", 10)


def test_a_stream_has_the_events_of_a_text(client: openai.OpenAI) -> None:
    whole = ask(client)
    with client.responses.stream(model="target", input=HI, temperature=0, max_output_tokens=60) as stream:
        assert [event.type for event in stream][-1] == "response.completed"
        assert stream.get_final_response().output_text == whole.output_text
    events = list(ask(client, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert {*kinds[4:-4]} == {"response.output_text.delta"}
    assert [event.sequence_number for event in events] == [*range(len(events))]


def test_a_call_and_its_result(client: openai.OpenAI) -> None:
    done = ask(client, tools=TOOLS, tool_choice="required", max_output_tokens=None)
    (call,) = done.output
    jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert (call.type, done.status, call.status) == ("function_call", "completed", "completed")
    events = list(ask(client, tools=TOOLS, tool_choice="required", max_output_tokens=None, stream=True))
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    (whole,) = (event for event in events if event.type == "response.function_call_arguments.done")
    assert "".join(deltas) == whole.arguments == call.arguments == events[-1].response.output[0].arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Done."}
    after = ask(client, tools=TOOLS, input=[{"role": "user", "content": HI}, *done.output, result])
    assert after.output_text


def test_a_named_tool_and_none(client: openai.OpenAI) -> None:
    done = ask(client, tools=TOOLS, tool_choice={"type": "function", "name": "book"})
    assert [item.name for item in done.output] == ["book"]
    assert done.tool_choice.name == "book"
    assert ask(client, tools=TOOLS, tool_choice="none").output_text == ask(client).output_text
    cut = ask(client, tools=TOOLS, tool_choice={"type": "function", "name": "order"}, max_output_tokens=9)
    assert (cut.status, cut.output[0].status) == ("incomplete", "incomplete")


def test_text_of_a_schema(client: openai.OpenAI) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "order", "schema": SCHEMA, "strict": True}}
    done = ask(client, text=text, max_output_tokens=None)
    jsonschema.validate(json.loads(done.output_text), SCHEMA)
    assert done.text.format.type == "json_schema"


def test_what_agents_send_changes_nothing(client: openai.OpenAI) -> None:
    sent: dict[str, Any] = {
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "x",
        "text": {"verbosity": "low"},
        "truncation": "auto",
        "reasoning": {"summary": "auto"},
        "max_tool_calls": 3,
    }
    done = ask(client, **sent)
    assert (done.output_text, done.truncation) == (ask(client).output_text, "disabled")
    for _ in ask(client, **sent, stream=True, stream_options={"include_obfuscation": False}):
        pass


def test_a_cut_call_and_what_the_official_client_makes_of_answers_go_back(client: openai.OpenAI) -> None:
    class Order(BaseModel):
        drink: Literal["coffee", "tea"]

    asked: Any = {"model": "target", "input": HI, "temperature": 0}
    tool = openai.pydantic_function_tool(Order, name="order")["function"]
    calling: Any = asked | {"tools": [{"type": "function", **tool}], "tool_choice": "required"}
    with client.responses.stream(**calling) as stream:
        outputs: list[Any] = [stream.get_final_response().output]
    outputs += [client.responses.parse(**calling).output, client.responses.parse(**asked, text_format=Order).output]
    outputs.append(ask(client, tools=TOOLS, tool_choice={"type": "function", "name": "order"}, max_output_tokens=20).output)
    assert outputs[-1][0].arguments
    for items in (*outputs, *([each.model_dump(warnings=False) for each in output] for output in outputs)):
        result = {"type": "message", "role": "user", "content": "Well?"}
        assert (
            ask(client, input=[{"role": "user", "content": HI}, *items, result], max_output_tokens=1).usage.output_tokens == 1
        )


JSON = {"format": {"type": "json_object"}}
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "stored": ({"store": True}, "store", "keeps no answers"),
    "previous": ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no answers"),
    "conversation": ({"conversation": "conv_1"}, "conversation", "keeps no answers"),
    "background": ({"background": True}, "background", "False"),
    "two": ({"n": 2}, "n", "1"),
    "a web search": ({"tools": [{"type": "web_search"}]}, "tools", "function"),
    "an image": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
        "input",
        "input.0.message.content.0.type: this model reads text only; images, sound and files are refused",
    ),
    "another item": ({"input": [{"type": "computer_call"}]}, "input", "function_call_output"),
    "no items": ({"input": []}, "input", "at least 1"),
    "many items": ({"input": [{"role": "user", "content": "x"}] * 3000}, "input", "2,048"),
    "a thought alone": ({"input": [{"type": "reasoning"}]}, "input", "no message"),
    "no object": ({"input": 5}, "input", "string"),
    "another tool": ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "not in tools"),
    "no schema": ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text", "needs schema"),
    "no number": ({"text": {"format": {"type": "json_schema", "schema": {"examples": [math.inf]}}}}, "text", "not finite"),
    "a deep schema": (
        {"text": {"format": {"type": "json_schema", "schema": {"examples": json.loads("[" * 65 + "]" * 65)}}}},
        "text",
        "deeply",
    ),
    "a keyword": (
        {"text": {"format": {"type": "json_schema", "schema": {"type": "object", "unevaluatedProperties": False}}}},
        "text",
        "unevaluated",
    ),
    "both": ({"tools": TOOLS, "text": {"format": {"type": "json_object"}}}, "tools", "cannot be told"),
    "two forms": ({"text": JSON, "structured_outputs": {"regex": "a"}}, "structured_outputs", "2 kinds"),
    "an earlier form": ({"text": JSON, "guided_choice": ["a"]}, "structured_outputs", "2 kinds"),
    "a long answer": ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
    "unknown": ({"context_management": []}, "context_management", "no parameter"),
    "logprobs": ({"include": ["message.output_text.logprobs"]}, "include", "reasoning.encrypted_content"),
    "no effort": ({"reasoning": {"effort": "much"}}, "reasoning", "'high'"),
    "arguments": (
        {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "x"}]},
        "input",
        "not a JSON object",
    ),
}


def test_reasoning_belongs_to_its_own_turn() -> None:
    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}

    user, assistant = ({"role": role, "content": "x"} for role in ("user", "assistant"))
    items = [user, thought("cut"), user, assistant, user, thought("one "), thought("two"), assistant]
    made = ResponsesRequest.model_validate({"input": items}).template_messages()
    assert [each.get("reasoning_content") for each in made] == [None, None, None, None, "one two"]


def test_a_tool_is_defined_as_in_chats() -> None:
    (function,) = ResponsesRequest.model_validate({"input": "x", "tools": TOOLS[:1]}).functions
    inner = {name: value for name, value in TOOLS[0].items() if name not in ("type", "strict")}
    chat = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": inner}]}
    )
    assert function.definition() == chat.functions[0].definition()


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(server: Reached, case: str) -> None:
    fields, param, message = REFUSED[case]
    status, _, answer = fetch(f"{server.url}/v1/responses", json.dumps({"input": HI} | fields).encode())
    error = json.loads(answer)["error"]
    assert (status, error["param"]) == (400, param), error
    assert message in error["message"], error
