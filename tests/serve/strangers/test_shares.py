"""What some clients hold, others still get: connections, bytes and slots that are idle, slow, many or left."""

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

import psutil
import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from outrider.serve.app import create_app
from outrider.serve.engine import EngineThread
from outrider.serve.settings import Settings
from outrider.tests.serve.server import Server, fetch, serving
from outrider.tests.serve.strangers.lines import SHORT, connect, head, received

PAGE, HEALTH = (f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() for path in ("/", "/health"))


@pytest.fixture(scope="module", autouse=True)
def slow(server: Server) -> Iterator[socket.socket]:
    """A request whose body does not come, sent before all others: while they run, it waits."""
    with connect(server, head(SHORT, "Content-Type: application/json") + SHORT[:3]) as connection:
        yield connection


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
        if (cancelled := ended("cancelled") - before[0]) + (whole := ended("length") - before[1]) == 30:
            break
        time.sleep(0.1)
    assert cancelled + whole == 30
    assert whole <= 3  # an answer takes 0.2 s, and beside busy processes the server may hear too late that its client has left


def test_also_behind_a_server_that_raises_an_error_when_its_client_has_left(bundle: Path) -> None:
    """As ASGI servers do since version 2.4 of the specification: then nobody asks for the stream's first chunk."""
    settings = Settings(bundle)
    engine = EngineThread.from_settings(settings, None)
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
