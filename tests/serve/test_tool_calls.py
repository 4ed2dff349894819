"""Tool calls through real servers and clients: models that were never trained to call, and grammars that make them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai.lib.streaming._deltas import accumulate_delta
from pydantic import BaseModel

from outrider.bundle.manifest import CHAT_TEMPLATE
from outrider.tests.serve.calls import (
    CALLED,
    HI,
    ORDER,
    PARAMETERS,
    SCHEMAS,
    TEMPLATE,
    TOOLS,
    ask,
    check,
    nested,
    process,
    prompt_of,
    streamed,
    tool,
)
from outrider.tests.serve.server import Reached, chat_bundle, fetch, serving_here
from outrider.tests.support import reseal


@pytest.fixture(scope="module")
def server(
    trained_export: Path, tmp_path_factory: pytest.TempPathFactory, compilations: Callable[[], int]
) -> Iterator[Reached]:
    bundle = chat_bundle(trained_export, tmp_path_factory.mktemp("tools") / "bundle")
    (bundle / CHAT_TEMPLATE).write_text(TEMPLATE)
    reseal(bundle)
    with serving_here(bundle) as server:
        yield server


def test_a_required_call_is_valid_and_streams_the_same(client: openai.OpenAI) -> None:
    choice = ask(client, tool_choice="required").choices[0]
    assert (choice.finish_reason, choice.message.content, len(choice.message.tool_calls)) == ("tool_calls", None, 1)
    name, arguments = check(choice.message.tool_calls[0])
    calls, content, reason = streamed(ask(client, tool_choice="required", stream=True))
    assert ([(call["name"], json.loads(call["arguments"])) for call in calls], content, reason) == (
        [(name, arguments)],
        "",
        "tool_calls",
    )


def test_a_grammar_is_compiled_once(client: openai.OpenAI, compilations: Callable[[], int]) -> None:
    """Before it is tried, for all choices and for later requests, also where text may come before a call."""
    counts, tools = [compilations()], TOOLS[::-1]
    wanted = {"type": "json_schema", "json_schema": {"name": "order", "schema": ORDER}}
    for options in (
        {"n": 3, "tools": tools},
        {"tools": tools, "tool_choice": "required"},
        {"response_format": wanted, "tools": []},
    ):
        for _ in range(2):
            ask(client, **options, max_tokens=4)
            counts.append(compilations())
    assert [later - sooner for sooner, later in itertools.pairwise(counts)] == [1, 0] * 3


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_named_tool_is_called(client: openai.OpenAI, name: str) -> None:
    done = ask(
        client, tool_choice={"type": "function", "function": {"name": name}}, n=3, temperature=1.0, seed=3, logprobs=True
    )
    for choice in done.choices:
        (call,) = choice.message.tool_calls
        assert check(call)[0] == name
        assert choice.finish_reason == "tool_calls"
        assert choice.logprobs is not None
    assert len({call.id for choice in done.choices for call in choice.message.tool_calls}) == 3


def test_arguments_come_in_pieces(client: openai.OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "order"}}
    chunks = list(ask(client, tool_choice=choice, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.tool_calls for chunk in chunks if chunk.choices and chunk.choices[0].delta.tool_calls]
    assert len(pieces) > 2
    assert chunks[-1].usage.completion_tokens > 0


def test_text_is_free_where_a_call_is_not_required(client: openai.OpenAI) -> None:
    """The tiny pair does not call by itself, and says the same as with a grammar that allows all."""
    auto = ask(client, max_tokens=40).choices[0]
    assert auto.message.tool_calls is None
    assert auto.message.content
    none = ask(client, max_tokens=40, tool_choice="none").choices[0].message
    without = ask(client, max_tokens=40, tools=[]).choices[0].message
    assert none.content == without.content


def test_a_conversation_continues_after_a_call(client: openai.OpenAI, server: Reached) -> None:
    message = ask(client, tool_choice="required").choices[0].message
    call = message.tool_calls[0]
    messages = [*HI, message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "It is done."}]
    done = ask(client, messages=messages, max_tokens=20).choices[0]
    assert done.message.content
    body = {"messages": [*HI, message.model_dump(exclude_none=True), messages[-1]], "tools": TOOLS}
    _, _, tokens = fetch(f"{server.url}/tokenize", json.dumps(body).encode())
    _, _, text = fetch(f"{server.url}/detokenize", json.dumps({"tokens": json.loads(tokens)["tokens"]}).encode())
    prompt = json.loads(text)["prompt"]
    assert prompt.startswith("order: order something\n")
    arguments = json.dumps(json.loads(call.function.arguments))
    assert f'Agent: {{"name": "{call.function.name}", "parameters": {arguments}}}\nResult: It is done.\nAgent:' in prompt


def test_a_call_that_is_cut_says_so(client: openai.OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "order"}}
    done, shown = ask(client, tool_choice=choice), list[str]()
    whole = done.choices[0]
    for tokens in range(1, done.usage.completion_tokens, 3):
        cut = ask(client, tool_choice=choice, max_tokens=tokens).choices[0]
        assert cut.finish_reason == "length"
        shown += [call.function.arguments for call in cut.message.tool_calls or ()]
    assert len({*shown}) > 2
    assert all(whole.message.tool_calls[0].function.arguments.startswith(each) for each in shown)
    stop = ask(client, tool_choice=choice, stop='"cups').choices[0]
    assert (stop.finish_reason, "cups" in stop.message.tool_calls[0].function.arguments) == ("stop", False)


def test_a_conversation_continues_after_a_call_that_was_cut(client: openai.OpenAI, server: Reached) -> None:
    choice = {"type": "function", "function": {"name": "order"}}
    for tokens in range(8, 24, 3):
        message = ask(client, tool_choice=choice, max_tokens=tokens).choices[0].message
        calls = message.tool_calls or ()
        results = [{"role": "tool", "tool_call_id": call.id, "content": "It was cut."} for call in calls]
        again = ask(client, messages=[*HI, message, *results, *HI], max_tokens=1)
        assert again.usage.completion_tokens == 1


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("", "{}"),
        ('{"a": "b\\u00', '{"a": "b"}'),
        ('{"a": 1, "b', '{"a": 1}'),
        ('{"a": [1, {"b": "c', '{"a": [1, {"b": "c"}]}'),
        ('{"a": "\\ud83d', '{"a": "\ufffd"}'),
        ('{"a": "\\ude00\\ud83d\\ude00\\\\ud83d"}', '{"a": "\ufffd\U0001f600\\\\ud83d"}'),
    ],
)
def test_what_there_is_of_cut_arguments_is_kept(server: Reached, written: str, read: str) -> None:
    call = CALLED | {"function": {"name": "f", "arguments": written}}
    prompt = prompt_of(
        server, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "x"}
    )
    assert prompt == f'Agent: {{"name": "f", "parameters": {read}}}\nResult: x\nAgent:'


class Order(BaseModel):
    """Order a drink."""

    drink: Literal["coffee", "tea"]


def test_what_the_official_client_makes_of_answers_goes_back(client: openai.OpenAI, server: Reached) -> None:
    """Its helpers add fields to messages, and so does who adds up the deltas of a stream."""
    asked: Any = {"model": "target", "messages": HI, "temperature": 0}
    calling: Any = asked | {"tools": [openai.pydantic_function_tool(Order, name="order")], "tool_choice": "required"}
    with client.chat.completions.stream(**calling) as stream:
        made: list[Any] = [stream.get_final_completion().choices[0].message]
    made.append(client.chat.completions.parse(**calling).choices[0].message)
    parsed = client.chat.completions.parse(**asked, response_format=Order).choices[0].message
    summed: dict[Any, Any] = {}
    for chunk in client.chat.completions.create(**calling, stream=True):
        summed = accumulate_delta(summed, chunk.choices[0].delta.model_dump(exclude_unset=True))
    dumped = [each.model_dump(warnings=False) for each in made]
    assert all("parsed" in each and "parsed_arguments" in each["tool_calls"][0]["function"] for each in dumped)
    assert summed["tool_calls"][0]["index"] == 0
    for message in (*made, *dumped, summed):
        calls = message["tool_calls"] if isinstance(message, dict) else message.tool_calls
        call_id = calls[0]["id"] if isinstance(message, dict) else calls[0].id
        result: Any = {"role": "tool", "tool_call_id": call_id, "content": "Done."}
        assert client.chat.completions.create(**asked | {"messages": [*HI, message, result]}, max_tokens=1).usage
    prompts = {prompt_of(server, each, {"role": "tool", "tool_call_id": "1", "content": "x"}) for each in (*dumped, summed)}
    (prompt,) = prompts
    assert '"name": "order"' in prompt
    assert prompt_of(server, parsed.model_dump(warnings=False), *HI).startswith(f"Agent: {parsed.content}\n")


HUGE = 77e77  # stands for a number that JSON can write and no double can hold


REFUSED: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "another tool": (
        {"tools": tool(), "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        "not in tools",
    ),
    "no tools": ({"tool_choice": "required"}, "tool_choice", "not in tools"),
    "another choice": ({"tools": tool(), "tool_choice": "any"}, "tool_choice", "'none', 'auto' or 'required'"),
    "the same name": ({"tools": [*tool(), *tool()]}, "tools", "same name"),
    "a bad name": ({"tools": tool(name="a b")}, "tools", "name"),
    "a custom tool": ({"tools": [{"type": "custom", "custom": {}}]}, "tools", "type"),
    "many": ({"tools": tool() * 129}, "tools", "128"),
    "a keyword": ({"tools": tool(strict=True, parameters={"type": "object", "not": {}})}, "tools", "keyword not"),
    "a bad schema": ({"tools": tool(parameters={"type": "object", "properties": {"a": {"type": "thing"}}})}, "tools", "thing"),
    "no object": ({"tools": tool(parameters={"type": "string"})}, "tools", "a schema of type object"),
    "a deep schema": ({"tools": tool(parameters=nested(60))}, "tools", "deep"),
    "no number": ({"tools": tool(parameters=PARAMETERS | {"a": HUGE}), "tool_choice": "none"}, "tools", "not finite"),
    "a large schema": ({"tools": tool(parameters={"properties": {"a": {"const": "x" * 300_000}}})}, "tools", "characters"),
    "a format": ({"tools": tool(), "response_format": {"type": "json_object"}}, "tools", "cannot be told"),
    "arguments that are no JSON": (
        {"messages": [*HI, {"role": "assistant", "tool_calls": [CALLED | {"function": {"name": "f", "arguments": "{} x"}}]}]},
        "messages",
        "not a JSON object",
    ),
    "deep arguments": (
        {
            "messages": [
                *HI,
                {"role": "assistant", "tool_calls": [CALLED | {"function": {"name": "f", "arguments": '{"a": ' + "[" * 5000}}]},
            ]
        },
        "messages",
        "nested too deeply",
    ),
    "a result without an id": ({"messages": [*HI, {"role": "tool", "content": "x"}]}, "messages", "tool_call_id"),
    "a user's call": (
        {"messages": [{"role": "user", "content": "x", "tool_calls": [CALLED]}]},
        "messages",
        "only assistant messages",
    ),
    "nothing said": ({"messages": [{"role": "assistant"}]}, "messages", "needs content"),
    "many calls": ({"messages": [{"role": "assistant", "tool_calls": [CALLED] * 3000}]}, "messages", "the limit is 2,048"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_called_is_refused(server: Reached, case: str) -> None:
    body, param, message = REFUSED[case]
    sent = json.dumps({"messages": HI, "max_tokens": 5} | body).replace(json.dumps(HUGE), "1e999")
    status, _, answer = fetch(f"{server.url}/v1/chat/completions", sent.encode())
    error = json.loads(answer)["error"]
    assert (status, error["param"]) == (400, param), error
    assert message in error["message"], error
    assert server.health()[0] == 200


LANGCHAIN = """
import json, sys
from typing import Literal
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

class Order(BaseModel):
    "Order a drink."
    drink: Literal["coffee", "tea"]
    cups: int = Field(ge=1, le=9)

model = ChatOpenAI(base_url=sys.argv[1] + "/v1", api_key="none", model="target", temperature=0, max_retries=0)
bound = model.bind_tools([Order], tool_choice="any")
message = bound.invoke("A coffee, please.")
(call,) = message.tool_calls
Order.model_validate(call["args"])
after = model.bind_tools([Order]).invoke(
    [HumanMessage("A coffee, please."), message, ToolMessage("Done.", tool_call_id=call["id"])], max_tokens=10
)
whole = None
for chunk in bound.stream("A coffee, please."):
    whole = chunk if whole is None else whole + chunk
structured = [
    model.with_structured_output(Order, method=method).invoke("A coffee, please.").model_dump()
    for method in ("function_calling", "json_schema")
]
print(json.dumps([call["name"], call["args"], whole.tool_calls[0]["args"], after.content, *structured]))
"""
LITELLM = """
import json, sys
import litellm

schema = {"type": "object", "properties": {"drink": {"enum": ["coffee", "tea"]}}, "required": ["drink"]}
options = dict(
    model="openai/target",
    api_base=sys.argv[1] + "/v1",
    api_key="none",
    temperature=0,
    messages=[{"role": "user", "content": "A coffee, please."}],
    tools=[{"type": "function", "function": {"name": "order", "parameters": schema}}],
    tool_choice={"type": "function", "function": {"name": "order"}},
)
choice = litellm.completion(**options).choices[0]
(call,) = choice.message.tool_calls
chunks = list(litellm.completion(**options, stream=True))
built = litellm.stream_chunk_builder(chunks).choices[0]
(again,) = built.message.tool_calls
print(json.dumps([choice.finish_reason, call.function.name, *(json.loads(each.function.arguments) for each in (call, again))]))
"""


@pytest.mark.slow  # which takes seconds to import; it sends what other clients send
def test_langchain(server: Reached) -> None:
    name, arguments, in_stream, after, *structured = process(server, LANGCHAIN)
    assert (name, in_stream) == ("Order", arguments)
    assert after
    assert [{*each} for each in structured] == [{"drink", "cups"}] * 2


@pytest.mark.slow  # which takes seconds to import; it sends what other clients send
def test_litellm(server: Reached) -> None:
    reason, name, whole, in_stream = process(server, LITELLM)
    assert (reason, name, in_stream) == ("tool_calls", "order", whole)
    assert whole["drink"] in ("coffee", "tea")
