"""What a request may be: from which site or host, and with what body; a message names the cause of a refusal."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from outrider.serve.api.bodies import check_text, count_values
from outrider.serve.api.chat_protocol import ChatRequest
from outrider.serve.api.completions_protocol import CompletionRequest
from outrider.serve.api.errors import ApiError
from outrider.tests.serve.server import Server, fetch, serving
from outrider.tests.serve.strangers.lines import SHORT, connect, head, received
from outrider.tests.support import run_here

HALF_TEXTS = st.lists(st.sampled_from([*'\ud83d\ude00\udfff\\"/d8u', "ud83d", "\\ud83d", "\U0001f600"]), max_size=5).map(
    "".join
)
MANY = 30_000
PROMPT_TYPES = "prompt: Input should be text, a list of texts, a list of token ids, or a list of such lists"


def ask(server: Server, body: bytes, *lines: str) -> tuple[int, dict[str, Any]]:
    """Return the status and the error of the answer to exactly these lines."""
    with connect(server, head(body, "Connection: close", *lines) + body) as connection:
        answer = received(connection)
    top, _, rest = answer.partition(b"\r\n\r\n")
    return int(top.split()[1]), json.loads(rest).get("error", {})


@pytest.mark.parametrize(
    ("lines", "status", "code"),
    [
        ([], 415, "unsupported_media_type"),
        (["Content-Type: text/plain"], 415, "unsupported_media_type"),
        (["Content-Type: application/x-www-form-urlencoded"], 415, "unsupported_media_type"),
        (["Content-Type: text/plain; application/json"], 415, "unsupported_media_type"),
        (["Content-Type: application/json", "Sec-Fetch-Site: cross-site"], 403, "cross_site"),
        (["Content-Type: application/json", "Sec-Fetch-Site: same-origin"], 200, None),
        (["Content-Type: Application/JSON; charset=utf-8"], 200, None),
    ],
)
def test_what_a_web_page_of_another_site_can_send_is_refused(
    server: Server, lines: list[str], status: int, code: str | None
) -> None:
    for body in (SHORT, b"" if status != 200 else SHORT):
        answer, error = ask(server, body, *lines)
        assert (answer, error.get("code")) == (status, code), error
    if status == 415:
        assert "application/json" in error["message"]


def test_a_link_from_another_site_leads_to_the_chat_page(server: Server) -> None:
    for path, status in (("/", 200), ("/metrics", 403)):
        assert fetch(server.url + path, None, **{"Sec-Fetch-Site": "cross-site"})[0] == status


def test_an_address_that_others_can_reach_needs_keys_or_a_flag(bundle: Path) -> None:
    for host in ("0.0.0.0", "::"):
        done = run_here("serve", bundle, "--host", host, "--port", "0")
        assert done.returncode == 2
        error, hint = done.stderr.splitlines()
        assert error == f"error: others can reach {host}, and there are no API keys"
        assert "--no-auth" in hint
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_API_KEYS", "secret")
        done = run_here("serve", bundle, "--no-auth")
    assert (done.returncode, "leave out one of them" in done.stderr) == (2, True)
    done = run_here("serve", bundle, "--host", "no.such.host.invalid")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 2)
    with serving(bundle, "--host", "0.0.0.0", "--no-auth") as server:
        port = server.url.rsplit(":", 1)[1]
        assert fetch(f"http://127.0.0.1:{port}/v1/models", Host="some.example")[0] == 200
        taken = run_here("serve", bundle, "--port", port)
        assert (taken.returncode, len(taken.stderr.splitlines())) == (1, 2), taken.stderr
    with serving(bundle, "--host", "0.0.0.0", env={"OUTRIDER_API_KEYS": "secret"}) as server:
        port = server.url.rsplit(":", 1)[1]
        assert fetch(f"http://127.0.0.1:{port}/v1/models")[0] == 401


def test_every_loopback_address_is_guarded_against_rebinding(bundle: Path) -> None:
    with serving(bundle, "--host", "127.0.0.2") as server:
        assert server.url.startswith("http://127.0.0.2:")
        assert fetch(f"{server.url}/v1/models")[0] == 200
        status, _, answer = fetch(f"{server.url}/v1/models", Host="evil.example")
        assert (status, json.loads(answer)["error"]["code"]) == (403, "host_not_allowed")


def test_models_by_name(server: Server) -> None:
    assert json.loads(fetch(f"{server.url}/v1/models/target")[2])["id"] == "target"
    for name in ("other", "", "target/", "a/b"):
        status, _, answer = fetch(f"{server.url}/v1/models/{name}", Host="localhost")
        error = json.loads(answer)["error"]
        assert (status, error["code"], error["param"]) == (404, "model_not_found", "model"), name


def test_head_requests(server: Server) -> None:
    for path in ("/health", "/"):
        with connect(server, f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()) as connection:
            answer = received(connection)
        assert answer.startswith(b"HTTP/1.1 200 OK"), answer
        assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("completions", {"prompt": "x", "stop": ["a"] * 17}, "stop", "at most 16 items"),
        ("completions", {"prompt": "x", "stop": [5]}, "stop", "stop.0: Input should be a valid string"),
        ("completions", {"temperature": "hot", "prompt": "x", "stop": ["a"] * 17}, "temperature", "valid number"),
        ("completions", {"prompt": [1.0]}, "prompt", PROMPT_TYPES),
        ("completions", {"prompt": ["a", [1]]}, "prompt", PROMPT_TYPES),
        ("completions", {"prompt": [[1], [2, "a"]]}, "prompt", "prompt.1.1: Input should be a valid integer"),
        ("completions", {"prompt": "x", "stop": "a" * 1001}, "stop", "text of 1 to 1,000 characters"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "messages",
            "messages.0.content.0.type: this model reads text only; images, sound and files are refused",
        ),
    ],
)
def test_a_message_names_the_cause(server: Server, path: str, body: dict[str, Any], param: str, message: str) -> None:
    status, _, answer = fetch(f"{server.url}/v1/{path}", json.dumps(body).encode())
    error = json.loads(answer)["error"]
    assert (status, error["param"]) == (400, param), error
    assert message in error["message"]


def count_errors(kind: type[BaseModel], fields: dict[str, Any]) -> int:
    try:
        kind.model_validate(fields)
    except ValidationError as invalid:
        return invalid.error_count()
    return 0


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt": [{}] * MANY}, "prompt", PROMPT_TYPES),
        ({"prompt": [[]] * MANY}, "prompt", "at most 2048 items"),
        ({"prompt": [""] * MANY}, "prompt", "at most 2048 items"),
        ({"prompt": [[1], *[["a"] * MANY]]}, "prompt", "prompt.1.0: Input should be a valid integer"),
        ({"prompt": [1] * MANY}, "prompt", "the prompt has 30,000 tokens"),
        ({"messages": [{}] * MANY}, "messages", "30,000 messages and parts of messages; the limit is 2,048"),
        ({"messages": [{"role": "user", "content": [1] * MANY}]}, "messages", "30,001 messages and parts"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 9}] * 2000}, "messages", "20,000 messages"),
        ({"messages": [{"role": "nobody", "content": 1}] * 2000}, "messages", "messages.0.role: Input should be 'system'"),
        ({"prompt": "x", "logit_bias": {f"x{at}": "a" for at in range(50_000)}}, "logit_bias", "50,000 entries"),
        ({"prompt": "x", "metadata": {f"{at}": 1 for at in range(50_000)}}, "metadata", "50,000 entries"),
        ({"prompt": "x", "stop": [1] * MANY}, "stop", "stop.0: Input should be a valid string"),
        ({"prompt": "x", "stop_token_ids": [""] * MANY}, "stop_token_ids", "stop_token_ids.0: Input should be a valid integer"),
        ({"prompt": "x"} | {f"x{at}": 1 for at in range(50_000)}, "x0", "this server has no parameter x0"),
    ],
    ids=range(14),  # rather than bodies of a megabyte
)
def test_a_body_of_many_values_is_refused_at_the_first_error(
    server: Server, fields: dict[str, Any], param: str, message: str
) -> None:
    """To collect thousands of errors would stall the streams of all others for seconds."""
    path, kind = ("completions", CompletionRequest) if "messages" not in fields else ("chat/completions", ChatRequest)
    status, _, answer = fetch(f"{server.url}/v1/{path}", json.dumps(fields, separators=(",", ":")).encode())
    error = json.loads(answer)["error"]
    assert (status, error["param"]) == (400, param), error
    assert message in error["message"]
    assert count_errors(kind, fields) <= 3


def test_a_body_of_more_values_than_its_size_allows_is_refused_before_it_is_read(server: Server) -> None:
    body = json.dumps({"prompt": [1] * 70_000}, separators=(",", ":")).encode()
    status, _, answer = fetch(f"{server.url}/v1/completions", body)
    assert (status, json.loads(answer)["error"]["code"]) == (400, "too_many_values")


@pytest.mark.parametrize("text", ['\\", [', "[{,:", "\\\\,", "é{["])
def test_a_text_is_one_value_whatever_it_has(server: Server, text: str) -> None:
    prompt = text * (900_000 // len(json.dumps(text, ensure_ascii=False)))
    status, _, answer = fetch(f"{server.url}/v1/completions", json.dumps({"prompt": prompt}, ensure_ascii=False).encode())
    assert (status, json.loads(answer)["error"]["code"]) == (400, "context_length_exceeded"), answer


# In each place a text that is not any: as a value, deep in one, and as a name.
HALVES: list[tuple[str, dict[str, Any]]] = [
    ("v1/completions", {"prompt": "\ud800"}),
    ("v1/completions", {"prompt": "x", "\ud800": 1}),
    ("v1/completions", {"prompt": "x", "stop": ["a", "\ud83d\ud83d\ude00"]}),
    ("v1/completions", {"prompt": "x", "model": "\ude00\ud83d"}),
    ("v1/chat/completions", {"messages": [{"role": "user", "content": "x", "annotations": "\udfff"}]}),
    ("v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": ["\udc00"]}}),
    ("v1/responses", {"input": "x", "user": "\ud800"}),
    ("v1/responses", {"input": "x", "metadata": {"\ud800": "a"}}),
    ("v1/responses", {"input": "x", "instructions": "\\\ud83d\\\ude00"}),
    ("tokenize", {"prompt": "\ud800"}),
    ("detokenize", {"tokens": [1], "model": "\ud800"}),
]


@pytest.mark.parametrize(("path", "body"), HALVES)
def test_half_a_surrogate_pair_is_refused_wherever_it_is(server: Server, path: str, body: dict[str, Any]) -> None:
    status, _, answer = fetch(f"{server.url}/{path}", json.dumps(body).encode())
    assert (status, json.loads(answer)["error"]["code"]) == (400, "invalid_text"), answer


@given(st.recursive(st.integers() | HALF_TEXTS, lambda inner: st.lists(inner) | st.dictionaries(HALF_TEXTS, inner)))
def test_what_counts_as_half_a_pair(document: Any) -> None:
    body = json.dumps(document).encode()
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        with pytest.raises(ApiError, match="a lone surrogate"):
            check_text(body)
    else:
        check_text(body)


def values(document: Any) -> int:
    parts = document.values() if isinstance(document, dict) else document if isinstance(document, list) else ()
    return 1 + sum(map(values, parts))


TEXTS = st.text(st.sampled_from('a"\\,[]{}:\né'))


@given(st.recursive(st.integers() | TEXTS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner)), st.booleans())
def test_the_bound_on_the_number_of_values(document: Any, ascii_only: bool) -> None:
    bound = count_values(json.dumps(document, ensure_ascii=ascii_only).encode())
    assert values(document) <= bound <= 2 * values(document)


def test_as_many_messages_as_there_may_be(server: Server) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}]}] * 1024, "max_tokens": 1})
    status, _, answer = fetch(f"{server.url}/v1/chat/completions", body.encode())
    assert json.loads(answer)["error"]["code"] == "context_length_exceeded", (status, answer)


def test_a_chunked_body_that_is_too_large(server: Server) -> None:
    chunks = iter([b'{"prompt": "', *[b"x" * 65536] * 17, b'"}'])
    status, _, answer = fetch(f"{server.url}/v1/completions", chunks)  # type: ignore[arg-type]
    error = json.loads(answer)["error"]
    assert (status, error["code"]) == (413, "body_too_large")
    assert "larger than 1,048,576 bytes" in error["message"]


@pytest.mark.parametrize("length", ["transfer-encoding: chunked", "content-length: 2000000"])
def test_a_client_that_writes_all_before_it_reads_gets_its_refusal(server: Server, length: str) -> None:
    parts = [b"x" * 200_000] * 10
    if "chunked" in length:
        parts = [b"%x\r\n%s\r\n" % (len(each), each) for each in parts] + [b"0\r\n\r\n"]
    with connect(server, head(b"", "Content-Type: application/json", "Connection: close", length)) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(0.05)  # the answer is there long before the last one
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"body_too_large" in answer
