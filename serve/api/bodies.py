"""The bodies of requests: how many bytes of them are held at once, and how their JSON is read."""

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

HELD_BYTES = 64 << 20  # of all bodies; more where a few could not be as large as they may
# A value costs up to 0.1 us to read and as much to check, while all streams wait. In a body of the size that is allowed, a
# value may have this many bytes on average; token ids have five to seven.
BYTES_PER_VALUE = 16


# Half a surrogate pair, which JSON can escape and UTF-8 cannot have: of two escapes without the other.
HALF = re.compile(rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]", re.DOTALL)


def check_text(body: bytes) -> None:
    """Check that all texts of a JSON document, names included, are text. It takes up to 40 ms for a megabyte.

    Raises:
        ApiError: one has half a surrogate pair.
    """
    if b"\\u" in body and (half := HALF.search(body.replace(b"\\\\", b"  "))) is not None:
        message = (
            f"a text has half a surrogate pair, {half[0][:6].decode('ascii', 'replace')}, at byte {half.start():,} of the body"
        )
        raise ApiError(400, message, code="invalid_text")


def count_values(body: bytes) -> int:
    """Return an upper bound of the number of values in a JSON document, at most twice that number.

    It takes a millisecond or two for a megabyte, most of it without the interpreter's lock. Of a document that is not valid,
    the number means nothing.
    """
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    characters = np.frombuffer(unescaped, np.uint8)
    in_text = np.logical_xor.accumulate(characters == ord('"'))
    separators = (characters == ord(",")) | (characters == ord("[")) | (characters == ord("{"))
    return 1 + int(np.count_nonzero(separators & ~in_text))


class BodyBudget:
    """The bytes of all bodies that are held, while they come and until they are answered. Their owners share them fairly."""

    def __init__(self, max_bytes: int):
        """Take the most bytes that one body may have."""
        self._limit = max(HELD_BYTES, 4 * max_bytes)
        self.held: Counter[str] = Counter()  # bytes by owner

    @contextmanager
    def share(self, owner: str) -> Iterator[Callable[[int], None]]:
        """Provide a function that takes bytes for one body, until the block ends; it raises `ApiError` if there are too few."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            # An owner may have as many as are left, as with the places of `Ingress`.
            if size and self.held[owner] + size > self._limit - self.held.total():
                raise ApiError(
                    429, "the bodies of your unanswered requests are too large; try again later", code="too_many_bytes"
                )
            self.held[owner] += size
            taken += size

        try:
            yield take
        finally:
            self.held -= Counter({owner: taken})  # also forgets an owner that has none left


class _JsonRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        settings: Settings = self.app.state.settings
        limit = settings.max_bytes // BYTES_PER_VALUE
        if len(body) > limit and count_values(body) > limit:  # a value has a byte at least
            raise ApiError(400, f"the body has more than {limit:,} values", code="too_many_values")
        check_text(body)
        # The values of a body are many new objects and none is garbage, so to look for garbage among them takes longer than
        # to make and check them. This lasts until the event loop turns to something else.
        gc.disable()
        asyncio.get_running_loop().call_soon(gc.enable)
        return json.loads(body.decode("utf-8-sig"))  # json.loads would take other encodings, in which values are not counted


class JsonRoute(APIRoute):
    """A route whose requests are JSON, and are read quickly: all streams wait meanwhile."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the function that answers a request."""
        handler = super().get_route_handler()

        async def answer(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return answer
