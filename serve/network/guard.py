"""Checks on a request before its body is read: API key, host name, origin, content type, size.

This replaces Starlette's TrustedHostMiddleware, whose error for a wrong host is plain text. Clients of this API need an error
object that says what to do.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from contextlib import suppress
from ipaddress import IPv6Address, IPv6Network
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.serve.api.bodies import BodyBudget
from outrider.serve.api.errors import ApiError
from outrider.serve.metrics import Metrics
from outrider.serve.network.access import owner_of
from outrider.serve.settings import Settings

PUBLIC_PATHS = ("/", "/health")  # need no key
BODY_SECONDS = 30.0  # for a complete body to arrive
LINGER_SECONDS = 1.0  # for the rest of a body that was answered before it was complete


class Guard:
    """ASGI middleware that refuses requests, counts error responses, and sets `state.owner` to the sender of the request."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics | None = None):
        """Guard `app`. Without `metrics`, nothing is counted."""
        self._app, self._settings, self._metrics = app, settings, metrics
        self._bodies = BodyBudget(settings.max_bytes)
        self._names = [owner_of(key) for key in settings.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it to the application."""
        if scope["type"] == "websocket":  # this server has no websockets
            await send({"type": "websocket.close"})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        receive, send = lingering(receive, self._counting(send))
        if (refusal := self._refusal(scope)) is not None:
            await refusal.response()(scope, receive, send)
        else:
            with self._bodies.share(scope["state"]["owner"]) as take:
                await self._app(scope, self._limited(receive, take), send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        hosts, keys, public = self._settings.hosts, self._settings.keys, scope["path"] in PUBLIC_PATHS
        key = self._key(headers.get("authorization", ""))
        if keys and key is None and not public:
            return ApiError(401, "an API key is required: send the header Authorization: Bearer KEY", code="invalid_api_key")
        scope.setdefault("state", {})["owner"] = network((scope.get("client") or ("",))[0]) if key is None else self._names[key]
        if hosts and _host_name(headers.get("host", "")) not in hosts:
            # DNS rebinding: a web page can let its own host name resolve to this machine, and so send requests to this server.
            return ApiError(
                403, f"use {hosts[0]} as the host name, or protect the server with API keys", code="host_not_allowed"
            )
        if headers.get("sec-fetch-site") == "cross-site" and not public:
            return ApiError(403, "web pages of other sites may not send requests to this server", code="cross_site")
        kind = headers.get("content-type", "")
        if scope["method"] == "POST" and not _is_json(kind):  # web pages may send a few other types to any server
            message = f"the Content-Type is {kind!r}" if kind else "there is no Content-Type"
            return ApiError(415, f"{message}; send application/json", code="unsupported_media_type")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._settings.max_bytes:
            return self._too_large()
        return None

    def _counting(self, send: Send) -> Send:
        async def counting(message: Message) -> None:
            if self._metrics is not None and message["type"] == "http.response.start" and message["status"] >= 400:
                self._metrics.http_error(message["status"])
            await send(message)

        return counting

    def _limited(self, receive: Receive, take: Callable[[int], None]) -> Receive:
        """Limit the time and the size of a body as it arrives, and `take` its bytes."""
        received, complete = 0, False
        deadline = asyncio.get_running_loop().time() + BODY_SECONDS

        async def limited() -> Message:
            nonlocal received, complete
            try:
                async with asyncio.timeout_at(None if complete else deadline):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} seconds", code="timeout") from None
            complete = not message.get("more_body", False)
            size = len(message.get("body", b""))
            received += size
            if received > self._settings.max_bytes:
                raise self._too_large()
            take(size)
            return message

        return limited

    def _key(self, header: str) -> int | None:
        """Return the index of the key in an Authorization header."""
        scheme, _, token = header.partition(" ")
        # Compare with every key, each in constant time, so that the duration reveals nothing.
        given = token.strip().encode("latin-1")
        matches = [index for index, key in enumerate(self._settings.keys) if hmac.compare_digest(given, key.encode())]
        return matches[0] if matches and scheme.lower() == "bearer" else None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._settings.max_bytes:,} bytes", code="body_too_large")


def lingering(receive: Receive, send: Send) -> tuple[Receive, Send]:
    """Wrap both to give a client that is answered while it still sends its body a moment to finish.

    Closing a connection with unread bytes resets it. Clients that write their whole request before they read would see a broken
    pipe instead of the answer. The bytes that arrive in that moment are dropped.
    """
    complete = False

    async def received() -> Message:
        nonlocal complete
        message = await receive()
        complete = not message.get("more_body", False)
        return message

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body", False) and not complete:
            await send({**message, "more_body": True})
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    while not complete:
                        await received()
            message = {"type": "http.response.body"}
        await send(message)

    return received, sent


def _host_name(header: str) -> str | None:
    """Return the host name of a Host header, without the port."""
    try:
        return urlsplit(f"//{header}").hostname
    except ValueError:
        return None


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def network(host: str) -> str:
    """Return a client's IPv4 address, or the /64 network of its IPv6 address, because a client may choose the rest."""
    try:
        address = IPv6Address(host)
    except ValueError:
        return host
    return str(address.ipv4_mapped or IPv6Network((address, 64), strict=False))
