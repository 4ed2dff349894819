"""The HTTP server of one process: uvicorn, changed to let answers finish before it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from outrider.errors import EngineError, OutriderError
from outrider.serve.app import create_app
from outrider.serve.engine import LOGGER, EngineThread
from outrider.serve.network.connections import HEAD_SECONDS, Connection, listen
from outrider.serve.network.signals import handle_signals
from outrider.serve.settings import Settings


class HttpServer(uvicorn.Server):
    """Serves a bundle. At shutdown, late answers end with an error that asks for a retry; uvicorn would cut them off."""

    def __init__(self, settings: Settings, host: str, port: int, drain: int):
        """Listen on all addresses of a host.

        Args:
            port: the port; 0 picks a free one.
            drain: seconds that answers have to finish after a signal.

        Raises:
            EngineError: see `listen`.
            UsageError, FolderError: see `Settings.memory`.
        """
        self._drain, self._memory = drain, settings.memory()
        self.listeners = listen(host, port)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.listeners[0].getsockname()[1]}"
        self._engine = EngineThread.from_settings(settings, self._memory)
        config = uvicorn.Config(
            create_app(settings, self._engine),
            loop="asyncio",  # other loops do not call `Listener.accept`
            http=Connection,
            ws="none",
            log_config=None,
            access_log=False,
            timeout_keep_alive=HEAD_SECONDS,
            # By default uvicorn trusts forwarded addresses from this machine, so local users could pose as other clients.
            proxy_headers="FORWARDED_ALLOW_IPS" in os.environ,
            timeout_graceful_shutdown=drain + 5,
        )
        super().__init__(config)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal arrives, or until `should_exit` is set. Then write the memory to its file. If that fails, end
        with exit code 1."""
        super().run(sockets or [*self.listeners])
        if self._memory is None or not self._memory.changed:
            return
        try:
            if self._engine.running is not None:  # it has hung
                raise EngineError("the engines have not stopped", "look for a hung step in the log")
            self._memory.write()
        except OutriderError as error:
            LOGGER.error("the memory could not be written", extra={"error": str(error), "hint": error.hint})
            sys.exit(1)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to serve, and log the address."""
        await super().startup(sockets)
        LOGGER.info(f"running on {self.url}")

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Shut down in order at a signal. uvicorn's own version raises the signal again afterwards, which kills the process."""
        if threading.current_thread() is threading.main_thread():
            handle_signals(self.handle_exit)
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start to shut down. A second SIGINT comes from a person who does not want to wait for the answers."""
        if self.should_exit and sig == signal.SIGINT:
            self._engine.end()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let answers finish, for at most `drain` seconds."""
        asyncio.get_running_loop().call_later(self._drain, self._engine.end)
        await super().shutdown(sockets)
