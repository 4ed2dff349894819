"""Clients that a public server has to expect, all at once."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from outrider.scripts.load_test.server import GREEDY_KEY, Server

HUGE = 2  # clients that post prompts of a megabyte, as text and as lists, back to back
IDLE = 100  # connections that are opened and left alone
GREEDY = 32  # clients that share a key and want long answers
MEGABYTE = 1_000_000
COMBINING = "e\u0301" * 10  # normalizing these takes a tokenizer longer than plain letters
MANY = MEGABYTE // 4  # items of a list, each of which would be an error or a prompt of its own
KINDS = ("huge prompts", "idle connections", "a greedy key")


def _encoded(name: str, fields: dict[str, Any]) -> tuple[str, str, bytes]:
    """Return a name for what a body is, the path that it goes to, and the body."""
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    return name, path, json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()


# Encoded once: good clients are in the same process, and would wait for it.
HUGE_BODIES = [
    _encoded("huge prompt", {"prompt": "word " * (MEGABYTE // 5), "max_tokens": 8}),
    _encoded("huge prompt", {"prompt": COMBINING * (MEGABYTE // len(COMBINING.encode())), "max_tokens": 8}),
    _encoded("huge list", {"prompt": [{}] * MANY}),
    _encoded("huge list", {"prompt": [[]] * MANY}),
    _encoded("huge list", {"messages": [{"role": "user", "content": [1] * MANY}]}),
]
GREEDY_BODY = _encoded("greedy key", {"prompt": "Once upon a time", "max_tokens": 256})


class Hostile:
    """Hostile clients in threads. `replies` counts what they got: a status, or what became of the connection."""

    def __init__(self, server: Server, kinds: Sequence[str]):
        """Prepare clients of some of `KINDS`."""
        self._server = server
        self._kinds = kinds
        self._stopped = threading.Event()
        self.replies: Counter[str] = Counter()

    def _post(self, name: str, path: str, body: bytes) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=60)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {GREEDY_KEY}"}
        try:
            connection.request("POST", path, body, headers)
            response = connection.getresponse()
            response.read()
            self.replies[f"{name}: {response.status}"] += 1
        except OSError as error:
            self.replies[f"{name}: {type(error).__name__}"] += 1
        finally:
            connection.close()

    def _huge(self) -> None:
        for each in HUGE_BODIES:
            self._post(*each)

    def _greedy(self) -> None:
        self._post(*GREEDY_BODY)

    def _idle(self) -> None:
        connections: list[socket.socket] = []
        try:
            while len(connections) < IDLE:
                connections.append(socket.create_connection(("127.0.0.1", self._server.port), timeout=5))
                connections[-1].sendall(b"POST /v1/completions HTTP/1.1\r\n")
        except OSError as error:
            self.replies[f"idle connection: {type(error).__name__}"] += 1
        self._stopped.wait(2)
        for each in connections:
            each.close()

    def _repeat(self, act: Callable[[], None]) -> None:
        while not self._stopped.is_set():
            act()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run all of them until the block ends."""
        kinds = dict(zip(KINDS, ([self._huge] * HUGE, [self._idle], [self._greedy] * GREEDY), strict=True))
        acts = [act for kind in self._kinds for act in kinds[kind]]
        threads = [threading.Thread(target=self._repeat, args=(act,), daemon=True) for act in acts]
        for thread in threads:
            thread.start()
        time.sleep(1)  # until they are all at it
        try:
            yield
        finally:
            self._stopped.set()
            for thread in threads:
                thread.join(120)
