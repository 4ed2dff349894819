"""Limits the bytes of request bodies that are held at once, and parses their JSON."""

from __future__ import annotations

import asyncio
import gc
import json
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from outrider.serve.api.errors import ApiError
from outrider.serve.settings import Settings

HELD_BYTES = 64 << 20  # limit for all bodies together; raised if it is less than four bodies of the maximum size
# Parsing a value takes up to 0.1 us, and checking it as long, while all streams wait. A body of the maximum size may have one
# value per this many bytes; token ids take five to seven bytes each.
BYTES_PER_VALUE = 16


# A lone surrogate: one escape of a pair without the other. JSON can escape it, but UTF-8 cannot encode it.
HALF = re.compile(rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]", re.DOTALL)


def check_text(body: bytes) -> None:
    """Check that all strings of a JSON document, including names, are valid text. Takes up to 40 ms per megabyte.

    Raises:
        ApiError: a string has a lone surrogate.
    """
    if b"\\u" in body and (half := HALF.search(body.replace(b"\\\\", b"  "))) is not None:
        message = (
            f"a string has a lone surrogate, {half[0][:6].decode('ascii', 'replace')}, at byte {half.start():,} of the body"
        )
        raise ApiError(400, message, code="invalid_text")


def count_values(body: bytes) -> int:
    """Return an upper bound of the number of values in a JSON document, at most twice that number.

    Takes a millisecond or two per megabyte, mostly without the GIL. For invalid JSON the number means nothing.
    """
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    characters = np.frombuffer(unescaped, np.uint8)
    in_text = np.logical_xor.accumulate(characters == ord('"'))
    separators = (characters == ord(",")) | (characters == ord("[")) | (characters == ord("{"))
    return 1 + int(np.count_nonzero(separators & ~in_text))


class BodyBudget:
    """Limits the bytes of all bodies, from their first byte until they are answered. Owners share the limit fairly."""

    def __init__(self, max_bytes: int):
        """Set the limit; `max_bytes` is the maximum size of one body."""
        self._limit = max(HELD_BYTES, 4 * max_bytes)
        self.held: Counter[str] = Counter()  # bytes by owner

    @contextmanager
    def share(self, owner: str) -> Iterator[Callable[[int], None]]:
        """Provide a function that takes bytes for one body until the block ends. It raises `ApiError` if too few are left."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            # An owner may hold as many bytes as are left, as with the places of `Ingress`.
            if size and self.held[owner] + size > self._limit - self.held.total():
                raise ApiError(
                    429, "the bodies of your unanswered requests are too large; try again later", code="too_many_bytes"
                )
            self.held[owner] += size
            taken += size

        try:
            yield take
        finally:
            self.held -= Counter({owner: taken})  # also drops an owner that holds none


class _JsonRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        settings: Settings = self.app.state.settings
        limit = settings.max_bytes // BYTES_PER_VALUE
        if len(body) > limit and count_values(body) > limit:  # a value has at least one byte
            raise ApiError(400, f"the body has more than {limit:,} values", code="too_many_values")
        check_text(body)
        # The values of a body are many new objects, none of them garbage. Collecting garbage among them would take longer than
        # creating and checking them, so the collector is off until the event loop runs something else.
        gc.disable()
        asyncio.get_running_loop().call_soon(gc.enable)
        return json.loads(
            body.decode("utf-8-sig")
        )  # given bytes, json.loads would accept encodings that count_values cannot read


class JsonRoute(APIRoute):
    """A route that parses JSON requests quickly, because all streams wait in the meantime."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the function that answers a request."""
        handler = super().get_route_handler()

        async def answer(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return answer
