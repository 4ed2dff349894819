"""How many connections there may be, and how long each may wait: the protocol alone, with limits of a fraction of a second."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from outrider.serve.network import connections
from outrider.serve.network.connections import Connection, listen

ASKED = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[str], Awaitable[Streams]]


def served(client: Callable[[Connect, uvicorn.Server], Awaitable[None]], size: int = 2, seconds: float = 0.0) -> None:
    """Run a client of a server whose answers have this size and take so long."""
    opened: list[Streams] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(seconds)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(size).encode())]})
        await send({"type": "http.response.body", "body": b"x" * size})

    async def main() -> None:
        (listener,) = listen("127.0.0.1", 0)
        port = listener.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(app, http=Connection, ws="none", lifespan="off", log_config=None))
        running = asyncio.create_task(server.serve([listener]))

        async def connect(address: str) -> Streams:
            opened.append(await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0)))
            return opened[-1]

        try:
            await client(connect, server)
        finally:
            for _, writer in opened:
                writer.close()
                with suppress(ConnectionError):
                    await writer.wait_closed()
            server.should_exit = server.force_exit = True
            await running

    asyncio.run(asyncio.wait_for(main(), 60))


async def is_open(connection: Streams) -> bool:
    try:
        return await asyncio.wait_for(connection[0].read(1), 0.05) != b""
    except TimeoutError:
        return True
    except ConnectionError:
        return False


def test_the_client_that_has_most_connections_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 3)

    async def client(connect: Connect, server: uvicorn.Server) -> None:
        other = await connect("127.0.0.9")
        many = []
        for _ in range(6):
            many.append(await connect("127.0.0.1"))
            await asyncio.sleep(0.05)
        assert [await is_open(each) for each in many] == [False] * 4 + [True] * 2  # those that waited longest went first
        other[1].write(ASKED)
        assert (await other[0].readline()).startswith(b"HTTP/1.1 200")

    served(client)


def test_a_connection_waits_so_long_for_a_request_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)

    async def client(connect: Connect, server: uvicorn.Server) -> None:
        silent, asked, slow = [await connect("127.0.0.1") for _ in range(3)]
        asked[1].write(ASKED)
        slow[1].write(b"GET / HTTP/1.1\r\n")
        for each in (silent, slow):
            assert await asyncio.wait_for(each[0].read(1), 10) == b""
        assert (await asked[0].readline()).startswith(b"HTTP/1.1 200")  # its answer takes longer than a head may

    served(client, seconds=0.7)


def test_a_client_that_does_not_read_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALL_SECONDS", 0.3)
    size = 32 << 20

    async def client(connect: Connect, server: uvicorn.Server) -> None:
        reader, writer = await connect("127.0.0.1")
        writer.write(ASKED)
        await reader.readline()
        for _ in range(200):
            if not server.server_state.connections:
                break
            await asyncio.sleep(0.05)
        else:
            raise AssertionError("the connection is still open")

    served(client, size)
