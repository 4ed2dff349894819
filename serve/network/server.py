"""The HTTP server of one process: uvicorn over the application, which lets answers finish before it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from outrider.serve.app import create_app
from outrider.serve.engine import LOGGER, EngineThread
from outrider.serve.network.connections import HEAD_SECONDS, Connection, listen
from outrider.serve.network.signals import handle_signals
from outrider.serve.settings import Settings


class HttpServer(uvicorn.Server):
    """Serves a bundle. Answers that do not end in time get an error that asks for a retry; uvicorn would cut them off."""

    def __init__(self, settings: Settings, host: str, port: int, drain: int):
        """Listen on all addresses of a host; port 0 is a free one. `drain` is the time for answers to finish, in seconds.

        Raises:
            EngineError: it cannot.
        """
        self.listeners = listen(host, port)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.listeners[0].getsockname()[1]}"
        self._drain, self._engine = drain, EngineThread.from_settings(settings)
        config = uvicorn.Config(
            create_app(settings, self._engine),
            loop="asyncio",  # others do not accept through a `Listener`
            http=Connection,
            ws="none",
            log_config=None,
            access_log=False,
            timeout_keep_alive=HEAD_SECONDS,
            # uvicorn would trust this machine, and so let its users choose whose requests they send.
            proxy_headers="FORWARDED_ALLOW_IPS" in os.environ,
            timeout_graceful_shutdown=drain + 5,
        )
        super().__init__(config)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal ends the process, or until `should_exit` is set."""
        super().run(sockets or [*self.listeners])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve, and say where."""
        await super().startup(sockets)
        LOGGER.info(f"running on {self.url}")

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End in order at a signal: uvicorn would then pass it on to the handler before, and the process would end by it."""
        if threading.current_thread() is threading.main_thread():
            handle_signals(self.handle_exit)
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end. A second SIGINT comes from a person who does not want to wait for the answers."""
        if self.should_exit and sig == signal.SIGINT:
            self._engine.end()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let answers finish, but no longer than that."""
        asyncio.get_running_loop().call_later(self._drain, self._engine.end)
        await super().shutdown(sockets)
