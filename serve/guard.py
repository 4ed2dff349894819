"""Checks on a request before anything reads it: host name, API key, size.

Starlette's TrustedHostMiddleware would answer a wrong host in plain text, but clients of this API need an error object that
says what to do.
"""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.serve.errors import ApiError
from outrider.serve.metrics import Metrics
from outrider.serve.settings import Settings

PUBLIC_PATHS = ("/", "/health")  # need no key


class Guard:
    """ASGI middleware that refuses requests by host name, API key and size, and counts error responses."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics | None = None):
        """Guard `app`; without `metrics`, nothing is counted."""
        self._app, self._settings, self._metrics = app, settings, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that is refused, and pass on any other."""
        if scope["type"] == "websocket":  # this server has none
            await send({"type": "websocket.close"})
        elif scope["type"] != "http":
            await self._app(scope, receive, send)
        elif (refusal := self._refusal(scope)) is not None:
            await refusal.response()(scope, receive, self._counting(send))
        else:
            await self._app(scope, self._limited(receive), self._counting(send))

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        hosts, keys = self._settings.hosts, self._settings.keys
        if keys and scope["path"] not in PUBLIC_PATHS and not self._has_key(headers.get(b"authorization", b"")):
            return ApiError(401, "an API key is required: send the header Authorization: Bearer KEY", code="invalid_api_key")
        if hosts and _host_name(headers.get(b"host", b"")) not in hosts:
            # DNS rebinding: a web page can make its own host name resolve to this machine, and so send requests here.
            return ApiError(403, f"use {hosts[0]} as the host name, or protect the server by API keys", code="host_not_allowed")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._settings.max_bytes:
            return self._too_large()
        return None

    def _counting(self, send: Send) -> Send:
        async def counting(message: Message) -> None:
            if self._metrics is not None and message["type"] == "http.response.start" and message["status"] >= 400:
                self._metrics.http_error(message["status"])
            await send(message)

        return counting

    def _limited(self, receive: Receive) -> Receive:
        """Bound a body that did not declare its length."""
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._settings.max_bytes:  # FastAPI lets this exception pass when it reads a body
                raise HTTPException(413, str(self._too_large()))
            return message

        return limited

    def _has_key(self, header: bytes) -> bool:
        scheme, _, token = header.partition(b" ")
        # Every key is compared, each in constant time, so that the duration reveals nothing.
        matches = [hmac.compare_digest(token.strip(), key.encode()) for key in self._settings.keys]
        return scheme.lower() == b"bearer" and any(matches)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._settings.max_bytes:,} bytes", code="body_too_large")


def _host_name(header: bytes) -> str | None:
    """Return the host name of a Host header, without the port."""
    try:
        return urlsplit(f"//{header.decode('latin-1')}").hostname
    except ValueError:
        return None
