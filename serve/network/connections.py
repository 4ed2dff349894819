"""The server's connections: how many are open, whose, and how long one may stay without a request or without reading an answer.

uvicorn bounds none of it: its limit on concurrency answers 503 to a whole request, and its timeout of idle connections begins
after the first answer.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import socket
import struct
from collections import Counter
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from outrider.errors import EngineError
from outrider.serve.api.assembler import sse
from outrider.serve.api.errors import ApiError
from outrider.serve.network.guard import network

HEAD_SECONDS = 10  # from the connection, or from the last answer, until the whole head of a request has come
STALL_SECONDS = 120.0  # for a client to read what fills the buffers
SEND_BUFFER = 1 << 16  # bytes; the kernel doubles it. By itself it would keep megabytes for each client that does not read
MAX_CONNECTIONS = 1000  # fewer where the process may open few files
RESERVED_FILES = 32  # file descriptors that connections leave to other files


def _too_many_files() -> bool:
    """Return whether so few file descriptors are left that a connection must make room."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        return limit != resource.RLIM_INFINITY and len(os.listdir("/dev/fd")) > limit - RESERVED_FILES
    except OSError as error:  # the listing needs one itself
        return error.errno == errno.EMFILE


class Listener(socket.socket):
    """A listening socket that accepts one connection in each turn of the event loop.

    asyncio would accept all that have come before it closes any, and try and log each that fails for want of a descriptor.
    """

    _pause = False

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection and its address.

        Raises:
            BlockingIOError: there is none, or the event loop is to close others first.
        """
        if self._pause:
            self._pause = False
            raise BlockingIOError
        accepted = super().accept()
        self._pause = True
        return accepted


def listen(host: str, port: int) -> list[Listener]:
    """Listen on all addresses of a host.

    Raises:
        EngineError: it cannot.
    """
    listeners: list[Listener] = []
    try:
        for family, *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE):
            try:
                bound = socket.create_server((str(address[0]), port), family=family)
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL and listeners:  # such as ::1 of localhost, where there is no IPv6
                    continue
                raise
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # also of the connections
            listeners.append(Listener(fileno=bound.detach()))
            port = listeners[0].getsockname()[1]  # the same one on all addresses
    except OSError as error:
        message = f"cannot listen on {host}, port {port}: {error.strerror}"
        raise EngineError(message, "choose another --host or --port, or end what uses it") from error
    return listeners


class Connection(H11Protocol):
    """A connection that is closed when its client is too slow, or when there are too many and its client has most."""

    connections: set[Connection]  # type: ignore[assignment]  # of all clients; uvicorn has other kinds, too
    _network = ""  # of the client
    _waiting = True  # for a whole request
    _since = 0.0  # when it began to wait, or its request began, in seconds of the event loop's clock
    _idle: asyncio.TimerHandle | None = None  # closes it while it has no head of a request; for a body, `Guard` has a limit
    _stalled: asyncio.TimerHandle | None = None  # closes it while the client does not read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Begin to wait for a request; if there are too many connections, close one."""
        super().connection_made(transport)
        self._network = network(self.client[0]) if self.client else ""
        self._since = self.loop.time()
        self._update()
        if len(self.connections) > MAX_CONNECTIONS or _too_many_files():
            self._make_room()

    def data_received(self, data: bytes) -> None:
        """Read a part of a request."""
        super().data_received(data)
        self._update()

    def eof_received(self) -> None:
        """Close the connection. If an answer is not complete, it ends with an error.

        A client that closes only its side looks like one that has left, and answers to those would take time from others'.
        """
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return
        error = ApiError(400, "you closed your side of the connection before the answer was complete", code="half_closed")
        events: list[h11.Event] = [h11.Data(data=sse(error.body())), h11.EndOfMessage()]
        if not cycle.response_started:
            body = json.dumps(error.body()).encode()
            headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
            events = [h11.Response(status_code=400, headers=[*headers.items()]), h11.Data(data=body), h11.EndOfMessage()]
        cycle.disconnected = True  # before its application sends anything else
        with suppress(h11.LocalProtocolError):  # only a stream has no length
            for event in events:
                self.transport.write(self.conn.send(event) or b"")

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        super().on_response_complete()
        self._update()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        super().connection_lost(exc)
        self._update()
        self._unset_stalled()

    def pause_writing(self) -> None:
        """Give the client some time to read what fills the buffers."""
        super().pause_writing()
        self._stalled = self.loop.call_later(STALL_SECONDS, self.abort)

    def resume_writing(self) -> None:
        """Note that the client reads."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._unset_stalled()

    def expire(self) -> None:
        """Close the connection, and give the client some time to read what is left of an answer."""
        self.transport.close()
        self._update()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._stalled is not None:  # otherwise the kernel would keep what the client does not read
            linger = struct.pack("ii", 1, 0)
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.transport.abort()

    def _make_room(self) -> None:
        """Close a connection of the client that has most, so that others find places whatever one client does."""
        # One that is closing keeps its descriptor until its client has read the rest of an answer.
        still_open = [
            each for each in self.connections if not each.transport.is_closing() or each.transport.get_write_buffer_size()
        ]
        count = Counter(each._network for each in still_open)
        most = max(count.values())
        min((each for each in still_open if count[each._network] == most), key=Connection._rank).abort()

    def _rank(self) -> tuple[int, float]:
        """Return a key that sorts a client's connections: stalled for longest, waiting for longest, the latest request."""
        if self._stalled is not None:
            return 0, self._stalled.when()
        return (1, self._since) if self._waiting else (2, -self._since)

    def _unset_stalled(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _update(self) -> None:
        closing = self.transport.is_closing()
        idle = not closing and (self.cycle is None or self.cycle.response_complete)
        if idle and self._idle is None:
            self._idle = self.loop.call_later(HEAD_SECONDS, self.expire)
        elif not idle and self._idle is not None:
            self._idle.cancel()
            self._idle = None
        waiting = idle or (not closing and self.cycle.more_body)
        if waiting != self._waiting:
            self._waiting, self._since = waiting, self.loop.time()
        if closing and self._stalled is None and self.transport.get_write_buffer_size():
            self._stalled = self.loop.call_later(STALL_SECONDS, self.abort)
