"""Requests as their lines, for what no well-behaved client sends."""

from __future__ import annotations

import json
import socket
from contextlib import suppress

from outrider.tests.serve.server import Server

SHORT = json.dumps({"prompt": "Once", "max_tokens": 2}).encode()


def connect(server: Server, sent: bytes = b"", source: str = "", buffer: int | None = None) -> socket.socket:
    """Connect from an address, with a receive buffer of this many bytes."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.socket()
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(60)
    connection.bind((source, 0))
    connection.connect((host, int(port)))
    connection.sendall(sent)
    return connection


def head(body: bytes, *lines: str) -> bytes:
    """The head of a request for a completion, whose body has another length than `body` if a line says so."""
    length = [f"Content-Length: {len(body)}"] if not any("length" in line or "chunked" in line for line in lines) else []
    return "\r\n".join(["POST /v1/completions HTTP/1.1", "Host: localhost", *length, *lines, "", ""]).encode()


def received(connection: socket.socket) -> bytes:
    """Return all that comes until the connection is closed."""
    parts: list[bytes] = []
    with suppress(ConnectionError):
        parts.extend(iter(lambda: connection.recv(65536), b""))
    return b"".join(parts)
