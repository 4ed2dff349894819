"""Limits on connections: how many may be open, and how long one may go without sending a request or reading an answer.

uvicorn has no such limits: its limit on concurrency answers 503 to a complete request, and its timeout of idle connections
starts after the first answer.
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

HEAD_SECONDS = 10  # from the connection, or from the last answer, until the complete head of a request has arrived
STALL_SECONDS = 120.0  # for a client to start reading when the buffers are full
SEND_BUFFER = 1 << 16  # bytes; the kernel doubles it. By default it would buffer megabytes for each client that does not read
MAX_CONNECTIONS = 1000  # fewer if the process may open few files
RESERVED_FILES = 32  # file descriptors that connections leave to other files


def _too_many_files() -> bool:
    """Return whether so few file descriptors are left that a connection must be closed."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        return limit != resource.RLIM_INFINITY and len(os.listdir("/dev/fd")) > limit - RESERVED_FILES
    except OSError as error:  # listing the folder needs a descriptor itself
        return error.errno == errno.EMFILE


class Listener(socket.socket):
    """A listening socket that accepts one connection in each iteration of the event loop.

    asyncio alone would accept all waiting connections before it closes any. If descriptors run out, it would log an error for
    each one.
    """

    _pause = False

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection and its address.

        Raises:
            BlockingIOError: there is none, or the event loop must run first, to close others.
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
        EngineError: an address cannot be listened on.
    """
    listeners: list[Listener] = []
    try:
        for family, *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE):
            try:
                bound = socket.create_server((str(address[0]), port), family=family)
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL and listeners:  # such as ::1 of localhost on a machine without IPv6
                    continue
                raise
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # connections inherit it
            listeners.append(Listener(fileno=bound.detach()))
            port = listeners[0].getsockname()[1]  # the same one on all addresses
    except OSError as error:
        message = f"cannot listen on {host}, port {port}: {error.strerror}"
        raise EngineError(message, "choose another --host or --port, or stop the program that uses it") from error
    return listeners


class Connection(H11Protocol):
    """A connection that is closed if its client is too slow, or if there are too many and its client has the most."""

    connections: set[Connection]  # type: ignore[assignment]  # of all clients; uvicorn's type allows other classes
    _network = ""  # of the client
    _waiting = True  # for a complete request
    _since = 0.0  # the time by the event loop's clock when it started to wait, or when its request started
    _idle: asyncio.TimerHandle | None = None  # closes it if no head of a request arrives; `Guard` has a limit for bodies
    _stalled: asyncio.TimerHandle | None = None  # closes it if the client does not read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's signature
        """Start to wait for a request. If there are too many connections, close one."""
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
        """Close the connection. An incomplete answer ends with an error.

        A client that closes only its own side cannot be told from one that has left, and answering the latter would waste time.
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
        """Start to wait for the next request."""
        super().on_response_complete()
        self._update()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        super().connection_lost(exc)
        self._update()
        self._unset_stalled()

    def pause_writing(self) -> None:
        """Give the client `STALL_SECONDS` to read: the buffers are full."""
        super().pause_writing()
        self._stalled = self.loop.call_later(STALL_SECONDS, self.abort)

    def resume_writing(self) -> None:
        """Stop the timer: the client reads again."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._unset_stalled()

    def expire(self) -> None:
        """Close the connection. The client has `STALL_SECONDS` to read the rest of an answer."""
        self.transport.close()
        self._update()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._stalled is not None:  # make the kernel drop the data that the client does not read
            linger = struct.pack("ii", 1, 0)
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.transport.abort()

    def _make_room(self) -> None:
        """Close a connection of the client that has the most, so that one client cannot keep others out."""
        # A closing connection keeps its descriptor until its client has read the rest of an answer.
        still_open = [
            each for each in self.connections if not each.transport.is_closing() or each.transport.get_write_buffer_size()
        ]
        count = Counter(each._network for each in still_open)
        most = max(count.values())
        min((each for each in still_open if count[each._network] == most), key=Connection._rank).abort()

    def _rank(self) -> tuple[int, float]:
        """Return a sort key for the order of closing: stalled longest, then waiting longest, then the latest request."""
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
