"""How rounds become responses: the server's own application over an engine that plays back rounds, without a bundle."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import EngineError, OutriderError, UsageError
from outrider.runtime.request import Event
from outrider.runtime.request_queue import QueueFullError
from outrider.runtime.rounds.logprobs import Logprobs
from outrider.runtime.stats import Stats
from outrider.runtime.text.text import Text
from outrider.serve.api.logprobs import CompletionLogprobs
from outrider.serve.app import create_app
from outrider.serve.deliveries import TimedOutError
from outrider.serve.engine import NotReadyError
from outrider.serve.settings import Settings
from outrider.tests.serve.player import (
    CAPACITY,
    CHAT,
    COMPLETIONS,
    TEXT,
    TOOL,
    Player,
    ask,
    ids,
    messages,
    rounds,
    send,
    stream,
)
from outrider.tests.support import END, sentencepiece


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_says_what_a_whole_response_says(path: str) -> None:
    fields: dict[str, Any] = {"max_tokens": 50, "n": 2} | (messages() if path == CHAT else {})
    answers = rounds([*ids("It is a fine day."), 0]), rounds([*ids("Good morning, and good luck."), 0], each=4)
    status, whole = ask(Player(*answers), path, **fields)
    chunks = stream(Player(*answers), path, **fields, stream_options={"include_usage": True})
    *chunks, last = chunks
    assert (status, last["choices"], last["usage"]) == (200, [], whole["usage"])
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    for at, text in enumerate(("It is a fine day.", "Good morning, and good luck.")):
        choice, of = whole["choices"][at], [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == at]
        assert (choice["message"]["content"] if path == CHAT else choice["text"]) == text
        assert "".join(each["delta"].get("content", "") if path == CHAT else each["text"] for each in of) == text
        assert [each["finish_reason"] for each in of] == [None] * (len(of) - 1) + ["stop"]
        assert choice["finish_reason"] == "stop"


def test_why_an_answer_ends() -> None:
    text = ids("One, two, three, four, five.")
    for tokens, fields, reason, shown in (
        ([*text, 0], {}, "stop", "One, two, three, four, five."),
        (text, {"stop": ["thr"]}, "stop", "One, two, "),
        (text, {"max_tokens": len(ids("One, two"))}, "length", "One, two"),
        (ids("a") * CAPACITY, {}, "length", "a" * (CAPACITY - len(ids("Hi")) + 1)),  # the cache is full
    ):
        answer = {"max_tokens": 1000} | fields
        status, whole = ask(Player(rounds(tokens, 1)), **answer)
        assert (status, whole["choices"][0]["finish_reason"], whole["choices"][0]["text"]) == (200, reason, shown)
        status, whole = ask(Player(rounds(tokens, 1)), CHAT, **answer, **messages())
        choice = whole["choices"][0]
        assert (status, choice["finish_reason"], choice["message"]["content"]) == (200, reason, shown)


def test_usage_counts_a_prompt_once_and_every_choice() -> None:
    first, second = [*ids("A short one."), 0], [*ids("Another, which is longer."), 0]
    _, whole = ask(Player(rounds(first), rounds(second)), prompt=["Hi", "Hi"], n=2, max_tokens=90)
    prompt = len(ids("Hi"))
    completion = 2 * (len(first) + len(second))
    assert whole["usage"] == {
        "prompt_tokens": 2 * prompt,
        "completion_tokens": completion,
        "total_tokens": 2 * prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert whole["metrics"] is None
    _, whole = ask(Player(rounds(first)), max_tokens=90)
    counted = whole["metrics"]["speculative_decoding"]
    drafted = [len(each.drafted) for each in rounds(first) if each.drafted]
    assert (counted["num_spec_steps"], counted["num_draft_tokens"]) == (len(drafted), sum(drafted))
    assert (counted["num_accepted_draft_tokens"], counted["draft_acceptance_rate"]) == (sum(drafted), 1)


def test_logprobs_are_in_the_order_of_the_tokens_and_of_likelihood() -> None:
    tokens = [*ids("One, two, three."), 0]
    names = [TEXT.token(token) for token in tokens]
    _, whole = ask(Player(rounds(tokens)), logprobs=2, max_tokens=90)
    found = whole["choices"][0]["logprobs"]
    assert (found["tokens"], found["token_logprobs"]) == ([*names[:-1], ""], [-token for token in tokens])
    assert [[*each.items()] for each in found["top_logprobs"]] == [
        [(TEXT.token(token), -token), (TEXT.token(token + 1), -token - 1)] for token in tokens
    ]
    assert found["text_offset"] == [len("".join(names[:at])) for at in range(len(names))]
    streamed = [chunk["choices"][0]["logprobs"] for chunk in stream(Player(rounds(tokens)), logprobs=2, max_tokens=90)]
    assert {key: [each for part in streamed for each in part[key]] for key in found} == found
    _, whole = ask(Player(rounds(tokens)), CHAT, **messages(), logprobs=True, top_logprobs=2)
    content = whole["choices"][0]["logprobs"]["content"]
    assert [(each["token"], each["logprob"]) for each in content] == [*zip(names, found["token_logprobs"], strict=True)]
    assert [[top["logprob"] for top in each["top_logprobs"]] for each in content] == [[-t, -t - 1] for t in tokens]


def test_logprobs_of_half_characters_join_to_the_text() -> None:
    half = TEXT.tokenizer.token_to_id("\u00f0")  # of the byte 0xF0
    tokens = [*ids("A \U0001f642 n\u00e9"), half, 0]
    assert TEXT.token(half) == TEXT.token(half + 1) == "\ufffd"
    _, whole = ask(Player(rounds(tokens)), logprobs=2, max_tokens=90)
    text, found = whole["choices"][0]["text"], whole["choices"][0]["logprobs"]
    assert text == "A \U0001f642 n\u00e9\ufffd"
    assert "".join(found["tokens"]) == text
    offsets = found["text_offset"]
    assert [text[at:end] for at, end in itertools.pairwise([*offsets, len(text)])] == found["tokens"]
    assert [len(each) for each in found["top_logprobs"]] == [2] * len(tokens)
    first = tokens.index(half)
    assert (found["tokens"][first], [*found["top_logprobs"][first]]) == ("", ["bytes:\\xf0", "bytes:\\xf1"])
    _, whole = ask(Player(rounds(tokens)), CHAT, **messages(), logprobs=True, top_logprobs=2)
    content = whole["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(each["bytes"]) for each in content).decode(errors="replace") == text + END
    assert [each["bytes"] for each in content[first]["top_logprobs"]] == [[0xF0], [0xF1]]


def test_logprobs_keep_the_spaces_of_tokens_and_tell_equal_ones_apart() -> None:
    made: Any = sentencepiece()
    prompt, tokens = made.encode("b").ids, made.encode("a b").ids
    same = made.token_to_id("<0x61>"), made.token_to_id("a")
    top = Logprobs(-1.0, tuple((token, -1.0) for token in (*same, made.token_to_id("\u2581a"))))
    event = Event((*tokens, same[0]), (False,) * 3, (), Stats(), "length", (top, top, top))
    found = CompletionLogprobs(Text(made, None), prompt).append([event])
    assert (found["tokens"], found["text_offset"]) == ([" a", " b", "a"], [0, 2, 4])
    assert [*found["top_logprobs"][0]] == ["a", f"token_id:{same[1]}", " a"]
    assert [*found["top_logprobs"][2]] == ["a", f"token_id:{same[1]}", " a"]


def test_a_stop_string_of_half_a_character_at_the_end_is_no_text() -> None:
    tokens = [*ids("Hi"), TEXT.tokenizer.token_to_id("\u00f0")]
    asked: dict[str, Any] = {"max_tokens": len(tokens), "stop": "\ufffd"}
    for path, fields in ((COMPLETIONS, asked), (CHAT, asked | messages()), (CHAT, asked | messages() | {"tools": [TOOL]})):
        (choice,) = ask(Player(rounds(tokens)), path, **fields)[1]["choices"]
        assert (choice["finish_reason"], choice["message"]["content"] if path == CHAT else choice["text"]) == ("stop", "Hi")


def test_calls_are_apart_from_text_whole_and_in_a_stream() -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {"zone": "a\\"}b"}}\n</tool_call>'
    tokens = [*ids(f"Let me see.\n{call}\n{call}"), 0]
    asked = messages() | {"tools": [TOOL]}
    _, whole = ask(Player(rounds(tokens, 2)), CHAT, **asked)
    (choice,) = whole["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Let me see.")
    calls = choice["message"]["tool_calls"]
    assert [each["function"] for each in calls] == [{"name": "now", "arguments": '{"zone": "a\\"}b"}'}] * 2
    assert calls[0]["id"] != calls[1]["id"]
    said, arguments = "", ["", ""]
    deltas = [chunk["choices"][0]["delta"] for chunk in stream(Player(rounds(tokens, 2)), CHAT, **asked)]
    for delta in deltas:
        said += delta.get("content", "")
        for each in delta.get("tool_calls", ()):
            arguments[each["index"]] += each["function"]["arguments"]
    assert (said, arguments) == ("Let me see.", ['{"zone": "a\\"}b"}'] * 2)
    names = [each["function"]["name"] for delta in deltas for each in delta.get("tool_calls", ()) if "id" in each]
    assert names == ["now", "now"]
    _, cut = ask(Player(rounds(tokens, 2)), CHAT, **asked, max_tokens=len(tokens) - 12)
    assert cut["choices"][0]["finish_reason"] == "length"


ERRORS = [
    (UsageError("top_k is -2; it must be -1 or more", "change it", param="top_k"), 400, "top_k"),
    (QueueFullError("the queue is full", "try again later"), 429, "queue_full"),
    (NotReadyError("the bundle is still loading", "try again later"), 503, "not_ready"),
    (TimedOutError("the answer took longer than 9 seconds", "ask for fewer tokens"), 504, "timeout"),
    (EngineError("the logits contain NaN", "use fp32"), 500, "engine_error"),
    (ValueError("secret"), 500, "internal_error"),
]


def test_each_error_has_its_status_and_no_traceback() -> None:
    for error, status, name in ERRORS:
        code, body = ask(Player([], refusal=error))
        assert (code, name in (body["error"]["code"], body["error"]["param"])) == (status, True), error
        assert (str(error) in body["error"]["message"]) == isinstance(error, OutriderError)
        if isinstance(error, OutriderError):
            code, body = ask(Player(rounds(ids("One"), 1), error=error))
            assert (code, str(error) in body["error"]["message"]) == (status, True)


def test_an_error_ends_a_response_and_the_other_choices() -> None:
    player = Player(rounds(ids("One, two"), 1), error=EngineError("the device is gone", "restart the server"))
    assert ask(player, n=3, max_tokens=90)[0] == 500
    assert player.cancelled == player.requests[1:]
    player = Player(rounds(ids("One, two"), 1), error=player.error)
    response = asyncio.run(send(player, COMPLETIONS, {"prompt": "Hi", "stream": True, "n": 3, "max_tokens": 90}))
    *_, last = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert json.loads(last)["error"]["message"] == "the device is gone"
    assert player.cancelled == player.requests[1:]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_cancels_its_requests(streamed: bool) -> None:
    player: Any = Player(rounds(ids("One, two"), 1))  # the answers never end
    body = json.dumps({"prompt": "Hi", "stream": streamed, "n": 2, "max_tokens": 90}).encode()
    seen = asyncio.Event()
    incoming = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if incoming:
            return incoming.pop()
        if streamed:
            await seen.wait()
        while not player.requests:
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def answered(message: Any) -> None:
        if message["type"] == "http.response.body":
            seen.set()

    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": COMPLETIONS,
        "raw_path": b"",
        "query_string": b"",
        "root_path": "",
    }
    scope |= {"scheme": "http", "http_version": "1.1", "server": ("localhost", 80), "client": ("127.0.0.1", 1)}
    scope |= {"headers": [(b"host", b"localhost"), (b"content-type", b"application/json")], "asgi": {"spec_version": "2.3"}}

    async def leave() -> None:
        app = create_app(Settings(bundle=Path("none")), player)
        await asyncio.wait_for(app(scope, receive, answered), 5)

    asyncio.run(leave())
    assert len(player.requests) == 2
    assert Counter(map(id, player.cancelled)) == Counter(map(id, player.requests))  # each once


def test_prompts_are_logged_only_where_the_settings_say_so(caplog: pytest.LogCaptureFixture) -> None:
    private = "a most private matter"
    caplog.set_level(logging.INFO, "outrider.serve")
    for path, fields in ((COMPLETIONS, {"prompt": private}), (CHAT, messages(private) | {"tools": [TOOL]})):
        for allowed in (False, True):
            caplog.clear()
            assert ask(Player(rounds([*ids("Yes."), 0])), path, settings={"log_prompts": allowed}, **fields)[0] == 200
            (record,) = [each for each in caplog.records if each.msg == "answered"]
            assert (private in str(vars(record))) == allowed
            assert vars(record)["completion_tokens"] == len(ids("Yes.")) + 1


def test_more_choices_or_longer_prompts_than_the_server_allows_are_refused() -> None:
    player = Player(rounds(ids("One")))
    for fields, param in (({"n": 4}, "n"), ({"prompt": ["Hi"] * 4}, "n"), ({"prompt": [[1] * 10]}, "prompt")):
        status, body = ask(player, settings={"max_choices": 3, "max_prompt": 9}, **fields)
        assert (status, body["error"]["param"]) == (400, param), body
    assert not player.requests
