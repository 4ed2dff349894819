"""A server that strangers can reach: connections without requests, web pages of other sites, clients that ask for too much."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import Message

from outrider.serve.api.bodies import check_text, count_values
from outrider.serve.api.chat_protocol import ChatRequest
from outrider.serve.api.completions_protocol import CompletionRequest
from outrider.serve.api.errors import ApiError
from outrider.serve.app import create_app
from outrider.serve.engine import EngineThread
from outrider.serve.settings import Settings
from outrider.tests.serve.server import Server, chat_bundle, fetch, serving
from outrider.tests.support import run_here

HALF_TEXTS = st.lists(st.sampled_from([*'\ud83d\ude00\udfff\\"/d8u', "ud83d", "\\ud83d", "\U0001f600"]), max_size=5).map(
    "".join
)
MANY = 30_000
PROMPT_TYPES = "prompt: Input should be text, a list of texts, a list of token ids, or a list of such lists"
SHORT = json.dumps({"prompt": "Once", "max_tokens": 2}).encode()
PAGE, HEALTH = (f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() for path in ("/", "/health"))


@pytest.fixture(scope="module")
def bundle(trained_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_bundle(trained_export, tmp_path_factory.mktemp("strangers") / "bundle", batch=2)


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Server]:
    with serving(bundle) as server:
        yield server


def connect(server: Server, sent: bytes = b"", source: str = "", buffer: int | None = None) -> socket.socket:
    """Connect from an address, with a receive buffer of so many bytes."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.socket()
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(60)
    connection.bind((source, 0))
    connection.connect((host, int(port)))
    connection.sendall(sent)
    return connection


@pytest.fixture(scope="module", autouse=True)
def slow(server: Server) -> Iterator[socket.socket]:
    """A request whose body does not come, sent before all others: while they run, it waits."""
    with connect(server, head(SHORT, "Content-Type: application/json") + SHORT[:3]) as connection:
        yield connection


def head(body: bytes, *lines: str) -> bytes:
    """The head of a request for a completion, whose body has another length than `body` if a line says so."""
    length = [f"Content-Length: {len(body)}"] if not any("length" in line or "chunked" in line for line in lines) else []
    return "\r\n".join(["POST /v1/completions HTTP/1.1", "Host: localhost", *length, *lines, "", ""]).encode()


def ask(server: Server, body: bytes, *lines: str) -> tuple[int, dict[str, Any]]:
    """Return the status and the error of the answer to exactly these lines."""
    with connect(server, head(body, "Connection: close", *lines) + body) as connection:
        answer = received(connection)
    top, _, rest = answer.partition(b"\r\n\r\n")
    return int(top.split()[1]), json.loads(rest).get("error", {})


def received(connection: socket.socket) -> bytes:
    """Return all that comes until the connection is closed."""
    parts: list[bytes] = []
    with suppress(ConnectionError):
        parts.extend(iter(lambda: connection.recv(65536), b""))
    return b"".join(parts)


def is_open(connection: socket.socket) -> bool:
    """Return whether nothing comes any more, not even the end of the connection."""
    connection.settimeout(0.02)
    with suppress(ConnectionError):
        try:
            while connection.recv(65536):
                pass
        except TimeoutError:
            return True
    return False


def seconds_until_closed(connection: socket.socket, drip: bytes = b"") -> float:
    """Return after how long the server closes a connection to which a byte is written each second."""
    began = time.monotonic()
    connection.settimeout(1)
    while True:
        try:
            if not connection.recv(65536):
                return time.monotonic() - began
        except TimeoutError:
            connection.sendall(drip)
        except ConnectionError:
            return time.monotonic() - began
        assert time.monotonic() - began < 60


@pytest.mark.slow  # the next tests have other connections that fill it
def test_idle_connections_do_not_make_the_server_unreachable(bundle: Path) -> None:
    """More of them than the process may open files."""
    with serving(bundle, max_files=128) as server, ExitStack() as stack:
        before = sum(map(len, server.log))
        for sent in (b"", b"GET", head(SHORT, "Content-Type: application/json") + SHORT[:3]):
            for _ in range(160):
                stack.enter_context(connect(server, sent))
            for _ in range(5):
                assert server.health()[0] == 200
            assert fetch(f"{server.url}/v1/completions", SHORT)[0] == 200
        time.sleep(2)
        assert sum(map(len, server.log)) - before < 100_000


def test_clients_that_do_not_read_do_not_make_the_server_unreachable(bundle: Path) -> None:
    with serving(bundle, max_files=128) as server, ExitStack() as stack:
        for _ in range(100):
            with suppress(ConnectionError):
                stack.enter_context(connect(server, PAGE * 1500, buffer=2048)).recv(1)
        time.sleep(2)  # until the server cannot send more
        for source in ("127.0.0.9", "127.0.0.1"):
            with connect(server, HEALTH, source) as connection:
                assert b"200 OK" in connection.recv(65536)


def test_connections_make_room_for_those_of_clients_with_fewer(bundle: Path) -> None:
    """A body comes slowly while another client opens more connections than there is room for."""
    with serving(bundle, max_files=128) as server, ExitStack() as stack:
        slow = stack.enter_context(connect(server, head(SHORT, "Content-Type: application/json") + SHORT[:3], "127.0.0.9"))
        first, *rest = [stack.enter_context(connect(server, b"GET")) for _ in range(160)]
        slow.sendall(SHORT[3:])
        assert b"200 OK" in slow.recv(65536)
        assert (is_open(first), is_open(rest[-1])) == (False, True)


def test_connections_do_not_make_room_when_there_is_enough_again(bundle: Path) -> None:
    """The last ones have high descriptors, since few were left when they came."""
    with serving(bundle, max_files=128) as server, ExitStack() as stack:
        early = [stack.enter_context(connect(server))]
        while is_open(early[0]):
            assert len(early) < 128
            early.append(stack.enter_context(connect(server)))
        late = early[-5:]
        for connection in early[:-5]:
            connection.close()
        time.sleep(0.5)
        late += [stack.enter_context(connect(server)) for _ in range(5)]
        time.sleep(0.5)
        assert all(map(is_open, late))


def test_connections_that_send_no_request_or_a_slow_one_are_closed(server: Server) -> None:
    answered, kept = connect(server, HEALTH), connect(server, HEALTH)
    assert b"200 OK" in answered.recv(65536)
    cases = [
        (connect(server), b""),
        (connect(server, b"GET / HTTP/1.1\r\nX: "), b"x"),
        (answered, b"G"),
        (kept, b""),
    ]
    with ThreadPoolExecutor() as pool:
        times = list(pool.map(lambda case: seconds_until_closed(*case), cases))
    assert all(9 < each < 20 for each in times), times
    for connection, _ in cases:
        connection.close()


@pytest.mark.slow
def test_a_client_that_does_not_read_is_disconnected(server: Server) -> None:
    """It asks for more than fits into the buffers between the two."""
    with connect(server, PAGE * 2000, buffer=2048) as connection:
        time.sleep(130)
        answers = received(connection)
    assert answers
    assert b"HTTP/1.1 200 OK" in answers
    assert len(answers) < 500_000


def test_a_repeated_log_line_is_dropped(server: Server) -> None:
    before = len(server.log)
    for _ in range(200):
        with connect(server, b"nonsense\r\n\r\n") as connection:
            assert b" 400 " in connection.recv(65536)
    assert fetch(f"{server.url}/v1/completions", SHORT)[0] == 200
    for _ in range(100):
        if any('"answered"' in line for line in server.log[before:]):
            break
        time.sleep(0.05)
    assert len(server.log) - before < 60
    assert any('"answered"' in line for line in server.log[before:])


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


def test_bodies_have_a_budget_that_keys_share(bundle: Path) -> None:
    """One key sends bodies that do not end: some are refused, and what they hold grows no further. Another has room."""
    size = 1_000_000
    with serving(bundle, env={"OUTRIDER_API_KEYS": "greedy-key,second-key"}) as server, ExitStack() as stack:
        lines = ["Content-Type: application/json", "Authorization: Bearer greedy-key", "content-length: 1048576"]
        before = psutil.Process(server.process.pid).memory_info().rss
        unfinished = [stack.enter_context(connect(server, head(b"", *lines) + b" " * size)) for _ in range(80)]
        refused: list[socket.socket] = []
        deadline = time.monotonic() + 20
        while len(refused) < 80 - (64 << 20) // 2 // size and time.monotonic() < deadline:
            refused, *_ = select.select(unfinished, [], [], 0.1)
        answers = [each.recv(65536) for each in refused]
        assert 47 <= len(answers) < 60
        assert all(each.startswith(b"HTTP/1.1 429 ") for each in answers), answers[0]
        assert all(b"retry-after: 1" in each for each in answers)
        assert all(b'"code":"too_many_bytes"' in each for each in answers)
        assert psutil.Process(server.process.pid).memory_info().rss < before + (60 << 20)
        large = json.dumps({"prompt": "word " * (size // 5)}).encode()
        for key, status in (("second-key", 400), ("greedy-key", 429)):
            assert fetch(f"{server.url}/v1/completions", large, Authorization=f"Bearer {key}")[0] == status
        stack.close()
        for _ in range(100):
            if fetch(f"{server.url}/v1/completions", large, Authorization="Bearer greedy-key")[0] == 400:
                break
            time.sleep(0.1)
        else:
            raise AssertionError("the bytes of requests whose clients have left are still counted")


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


def test_a_refused_client_that_never_ends_its_body_is_left(server: Server) -> None:
    began = time.monotonic()
    with connect(
        server, head(b"", "Content-Type: application/json", "Connection: close", "content-length: 2000000")
    ) as connection:
        assert received(connection).startswith(b"HTTP/1.1 413 ")
    assert time.monotonic() - began < 10


def test_a_client_that_leaves_before_its_stream_begins_is_cancelled(server: Server) -> None:
    def ended(reason: str) -> float:
        lines = fetch(f"{server.url}/metrics")[2].decode().splitlines()
        return sum(float(line.split()[1]) for line in lines if f'requests_total{{finish_reason="{reason}"}}' in line)

    before = ended("cancelled"), ended("length")
    body = json.dumps({"prompt": "the " * 60, "max_tokens": 400, "min_tokens": 400, "stream": True}).encode()
    for _ in range(30):
        with connect(server, head(body, "Content-Type: application/json") + body) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close by a reset
    for _ in range(200):
        if ended("cancelled") == before[0] + 30:
            break
        time.sleep(0.1)
    assert (ended("cancelled"), ended("length")) == (before[0] + 30, before[1])


def test_also_behind_a_server_that_raises_an_error_when_its_client_has_left(bundle: Path) -> None:
    """As ASGI servers do since version 2.4 of the specification: then nobody asks for the stream's first chunk."""
    settings = Settings(bundle)
    engine = EngineThread.from_settings(settings)
    engine.start()
    assert engine.loaded.wait(60)
    body = json.dumps({"prompt": "Once", "max_tokens": 400, "min_tokens": 400, "stream": True}).encode()
    messages: list[Message] = [{"type": "http.request", "body": body}]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
    }

    async def receive() -> Message:
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(_: Message) -> None:
        raise OSError("the client has left")

    with suppress(ClientDisconnect):
        asyncio.run(create_app(settings, engine)(scope, receive, send))
    for _ in range(100):
        if b"requests_total{finish_reason=" in engine.metrics.text():
            break
        time.sleep(0.05)
    assert b'requests_total{finish_reason="cancelled"} 1.0' in engine.metrics.text()
    engine.stop()


def test_keys_get_fair_shares(bundle: Path) -> None:
    """One key fills all slots and the queue. Another waits only for a slot, and gets a place in the full queue."""
    keys = "greedy-key,second-key"
    long = json.dumps({"prompt": "Once", "max_tokens": 450, "min_tokens": 450, "n": 2, "temperature": 0}).encode()
    ended: list[int] = []
    lock = threading.Lock()

    with serving(bundle, "--max-waiting", "6", env={"OUTRIDER_API_KEYS": keys}) as server, ThreadPoolExecutor(8) as pool:

        def ask_for_much() -> int:
            status, *_ = fetch(f"{server.url}/v1/completions", long, Authorization="Bearer greedy-key")
            with lock:
                ended.append(status)
            return status

        running = [pool.submit(ask_for_much) for _ in range(4)]  # 2 choices each: 2 have slots, and 6 wait
        for _ in range(500):
            if b"outrider_num_requests_waiting 6.0" in fetch(f"{server.url}/metrics", Authorization="Bearer second-key")[2]:
                break
            time.sleep(0.01)
        began = ended.count(200)
        assert fetch(f"{server.url}/v1/completions", SHORT, Authorization="Bearer greedy-key")[0] == 429
        status, *_ = fetch(f"{server.url}/v1/completions", SHORT, Authorization="Bearer second-key")
        assert (status, ended.count(200) - began <= 1) == (200, True)
        assert sorted(each.result() for each in running) == [200, 200, 200, 429]  # the last of them made room
        metrics = fetch(f"{server.url}/metrics", Authorization="Bearer second-key")[2].decode()
    assert not any(key in text for key in keys.split(",") for text in (*server.log, metrics))


@pytest.mark.parametrize(
    ("env", "status"), [({}, 429), pytest.param({"FORWARDED_ALLOW_IPS": "127.0.0.1"}, 200, marks=pytest.mark.slow)]
)
def test_only_a_proxy_says_whose_requests_it_sends(bundle: Path, env: dict[str, str], status: int) -> None:
    """One more client finds a place in a full queue, but one more request of the same client does not."""
    long = json.dumps({"prompt": "Once", "max_tokens": 450, "min_tokens": 450, "n": 2}).encode()
    with serving(bundle, "--max-waiting", "6", env=env) as server, ThreadPoolExecutor(4) as pool:
        running = [
            pool.submit(fetch, f"{server.url}/v1/completions", long, **{"X-Forwarded-For": f"10.0.0.{i}"}) for i in range(4)
        ]
        for _ in range(500):
            if b"outrider_num_requests_waiting 6.0" in fetch(f"{server.url}/metrics")[2]:
                break
            time.sleep(0.01)
        assert fetch(f"{server.url}/v1/completions", SHORT, **{"X-Forwarded-For": "10.0.0.9"})[0] == status
        assert sorted(each.result()[0] for each in running) == [200, 200, 200, 200 if status == 429 else 429]


def test_a_body_that_does_not_come_is_not_waited_for(slow: socket.socket) -> None:
    assert slow.recv(65536).startswith(b"HTTP/1.1 408 ")
    assert seconds_until_closed(slow, b"x") < 20
