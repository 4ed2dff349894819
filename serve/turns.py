"""Lets each owner prepare one request at a time, so that owners do not wait for each other's requests."""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

from outrider.runtime.request_queue import QueueFullError


class Turns:
    """Counts the requests that are being prepared for the queue, and lets each owner prepare one at a time."""

    def __init__(self) -> None:
        self._waiting: Counter[Hashable] = Counter()  # requests of each owner, including the one whose turn it is
        self._turns: weakref.WeakValueDictionary[Hashable, asyncio.Lock] = weakref.WeakValueDictionary()

    @asynccontextmanager
    async def of(self, owner: Hashable, places: int, queued: Counter[Hashable]) -> AsyncIterator[None]:
        """Wait for an owner's turn, and hold it until the block ends.

        Args:
            owner: identifies the client that sent the request.
            places: the number of requests that may wait, here and in the queue. If all places are taken, an owner that has less
                than its share of them may still add requests, and every owner may have one.
            queued: the number of each owner's requests that wait in the queue.

        Raises:
            QueueFullError: too many are waiting.
        """
        waiting = self._waiting + queued
        own, total = waiting[owner], waiting.total()
        if own and total >= places and own >= places // len(waiting):
            raise QueueFullError(f"the queue is full: {total} requests are waiting", "try again later")
        turn = self._turns.setdefault(owner, asyncio.Lock())
        self._waiting[owner] += 1
        try:
            async with turn:
                yield
        finally:
            self._waiting[owner] -= 1
            self._waiting += Counter()  # drops owners without requests
