"""Hostile clients, as a public server must expect them."""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from outrider.experiments.load_test.server import GREEDY_KEY, Server

HUGE = 2  # clients that post prompts of a megabyte back to back, as text and as lists
IDLE = 100  # connections that are opened and then idle
GREEDY = 32  # clients that share a key and request long answers
MEGABYTE = 1_000_000
COMBINING = "e\u0301" * 10  # normalizing these takes a tokenizer longer than plain letters
MANY = MEGABYTE // 4  # items of a list; each item would be an error or a separate prompt
PLAIN = GRAMMAR = 16  # clients that share a key and request short answers, without a grammar or with one whose masks are slow
SLOW_GRAMMARS = 4  # clients whose grammars take up to the time limit to compile
SCHEMAS = 4  # clients that send small distinct schemas whose compiled forms take megabytes
KINDS = ("huge prompts", "idle connections", "a greedy key", "plain clients", "a grammar key", "a slow-grammar key", "schemas")


def _encoded(name: str, fields: dict[str, Any]) -> tuple[str, str, bytes]:
    """Return a name, the path, and the encoded body of a request."""
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    return name, path, json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()


# Encoded once, because encoding would delay the good clients, which run in the same process.
HUGE_BODIES = [
    _encoded("huge prompt", {"prompt": "word " * (MEGABYTE // 5), "max_tokens": 8}),
    _encoded("huge prompt", {"prompt": COMBINING * (MEGABYTE // len(COMBINING.encode())), "max_tokens": 8}),
    _encoded("huge list", {"prompt": [{}] * MANY}),
    _encoded("huge list", {"prompt": [[]] * MANY}),
    _encoded("huge list", {"messages": [{"role": "user", "content": [1] * MANY}]}),
]
GREEDY_BODY = _encoded("greedy key", {"prompt": "Once upon a time", "max_tokens": 256})
PLAIN_BODY = _encoded("plain client", {"prompt": "Once upon a time", "max_tokens": 64})
GRAMMAR_BODY = _encoded(
    "grammar key",
    {
        "prompt": "Once upon a time",
        "max_tokens": 64,
        "structured_outputs": {"grammar": 'start: "' + "qz" * 45 + '" s\ns: s s | s s s | /[a-z ]/ |'},
    },
)
SLOW_BODY = _encoded("slow-grammar key", {"prompt": "Hi", "guided_json": {"type": "integer", "multipleOf": 99999989}})
FACTORS = [{"type": "integer", "multipleOf": each} for each in (7, 11, 13, 17, 19)]


class Hostile:
    """Hostile clients in threads. `replies` counts the statuses and connection errors that they get."""

    def __init__(self, server: Server, kinds: Sequence[str]):
        """Prepare clients of some of `KINDS`."""
        self._server = server
        self._kinds = kinds
        self._stopped = threading.Event()
        self._titles = itertools.count()
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

    def _plain(self) -> None:
        self._post(*PLAIN_BODY)

    def _grammar(self) -> None:
        self._post(*GRAMMAR_BODY)

    def _slow_grammar(self) -> None:
        self._post(*SLOW_BODY)

    def _schema(self) -> None:
        self._post_schema(FACTORS)

    def _post_schema(self, factors: Sequence[dict[str, Any]]) -> None:
        schema = {"title": f"{next(self._titles)}", "allOf": factors}
        self._post(*_encoded("schema", {"prompt": "Hi", "max_tokens": 4, "structured_outputs": {"json": schema}}))

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

    def post_schemas(self, count: int) -> None:
        """Send `count` small distinct schemas from two threads, and wait for the answers."""

        def work() -> None:
            for _ in range(count // 2):
                self._post_schema(FACTORS[:3])

        threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _repeat(self, act: Callable[[], None]) -> None:
        while not self._stopped.is_set():
            act()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run all of them until the block ends."""
        others = [self._huge] * HUGE, [self._idle], [self._greedy] * GREEDY
        grammars = (
            [self._plain] * PLAIN,
            [self._grammar] * GRAMMAR,
            [self._slow_grammar] * SLOW_GRAMMARS,
            [self._schema] * SCHEMAS,
        )
        kinds = dict(zip(KINDS, (*others, *grammars), strict=True))
        acts = [act for kind in self._kinds for act in kinds[kind]]
        threads = [threading.Thread(target=self._repeat, args=(act,), daemon=True) for act in acts]
        for thread in threads:
            thread.start()
        time.sleep(1)  # until all of them are sending
        try:
            yield
        finally:
            self._stopped.set()
            for thread in threads:
                thread.join(120)
