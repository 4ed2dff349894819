"""What a request must pass before anything reads it."""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.serve.errors import ApiError
from outrider.serve.metrics import Metrics
from outrider.serve.settings import Settings

OPEN_PATHS = ("/", "/health")  # that need no key


class Guard:
    """Keys, names and the size of bodies, before anything reads them; and how many requests get an error."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics | None = None):
        self._app, self._settings, self._metrics = app, settings, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # there are none here
            await send({"type": "websocket.close"})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        refused: ApiError | None = None
        if self._settings.hosts and _host(headers.get(b"host", b"")) not in self._settings.hosts:
            # A page of the web may let its name mean this machine; a browser here then sends its requests to this server.
            refused = ApiError(
                403, f"ask for this server as {self._settings.hosts[0]}, or give it keys", code="host_not_allowed"
            )
        if scope["path"] not in OPEN_PATHS and self._settings.keys and not self._known(headers.get(b"authorization", b"")):
            refused = ApiError(401, "this needs a key: send the header Authorization: Bearer KEY", code="invalid_api_key")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._settings.max_bytes:
            refused = refused or self._too_large()

        async def noted(message: Message) -> None:
            if self._metrics is not None and message["type"] == "http.response.start" and message["status"] >= 400:
                self._metrics.refused.labels(str(message["status"])).inc()
            await send(message)

        if refused is not None:
            await refused.response()(scope, receive, noted)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._settings.max_bytes:  # as FastAPI lets pass from where it reads a body
                raise HTTPException(413, str(self._too_large()))
            return message

        await self._app(scope, counted, noted)

    def _known(self, header: bytes) -> bool:
        scheme, _, given = header.partition(b" ")
        # Each is compared, and each in constant time, so that how long it takes says nothing.
        matches = [hmac.compare_digest(given.strip(), key.encode()) for key in self._settings.keys]
        return scheme.lower() == b"bearer" and any(matches)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._settings.max_bytes:,} bytes", code="body_too_large")


def _host(header: bytes) -> str | None:
    """Of a Host header, without the port."""
    try:
        return urlsplit(f"//{header.decode('latin-1')}").hostname
    except ValueError:
        return None
