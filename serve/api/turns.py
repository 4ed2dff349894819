"""Whose turn it is: an owner's requests wait for each other, and not for those of other owners."""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

from outrider.runtime.request_queue import QueueFullError


class Turns:
    """Counts the requests that are worked on before they are queued, and lets an owner have one at a time."""

    def __init__(self) -> None:
        self._waiting: Counter[Hashable] = Counter()  # requests of each owner, with the one whose turn it is
        self._turns: weakref.WeakValueDictionary[Hashable, asyncio.Lock] = weakref.WeakValueDictionary()

    @asynccontextmanager
    async def of(self, owner: Hashable, places: int, queued: Counter[Hashable]) -> AsyncIterator[None]:
        """Wait for an owner's turn, and have it.

        Args:
            places: requests that may wait, here and in the queue. When they are taken, an owner may still have its share of
                them, and at least one.
            queued: how many requests of each owner wait in the queue.
            owner: anything that identifies whom the request is from.

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
            self._waiting += Counter()  # drops those that have none
