"""Requests that wait for a slot. Owners of requests get fair shares of the queue and of the free slots."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence

from outrider.errors import OutriderError
from outrider.runtime.request import Request


class QueueFullError(OutriderError):
    """No place is left in the queue."""


class RequestQueue:
    """Serves the owner first that runs the fewest requests. A full queue displaces requests of the owner that has the most."""

    def __init__(self) -> None:
        self.displaced: list[Request] = []  # for the caller to take: they lost their places to other owners' requests
        self._waiting: deque[Request] = deque()
        self._turns: dict[Hashable, int] = {}  # by owner: the number of the last admission

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def by_owner(self) -> Counter[Hashable]:
        """Return the number of waiting requests by owner. Any thread may call it."""
        return Counter(request.owner for request in list(self._waiting))

    def add(self, requests: Sequence[Request], owner: Hashable, places: int) -> None:
        """Append all requests of an owner, or none.

        If fewer than `places` are left, displace the newest of the least urgent requests of the owner with the most. No owner
        loses one while it has no more waiting than the newcomer will have (buffer stealing, McKenney 1990).

        Raises:
            QueueFullError: too few requests can be displaced.
        """
        missing = len(requests) + len(self._waiting) - places
        waiting = self.by_owner()
        limit = waiting[owner] + len(requests)
        displaced: list[Request] = []
        while len(displaced) < missing:
            most = max(waiting, key=waiting.__getitem__, default=owner)
            if waiting[most] <= limit:
                raise QueueFullError(f"the queue is full: {len(self._waiting)} requests are waiting", "try again later")
            theirs = sorted((each for each in self._waiting if each.owner == most), key=lambda each: each.priority)
            displaced.append(theirs[waiting[most] - 1])
            waiting[most] -= 1
        for request in displaced:
            self._waiting.remove(request)
        self.displaced += displaced
        self._waiting += requests

    def put_back(self, request: Request) -> None:
        """Insert a request at the front."""
        self._waiting.appendleft(request)

    def remove(self, request: Request) -> None:
        """Remove a request, if it is waiting."""
        if request in self._waiting:
            self._waiting.remove(request)

    def next(self, running: Sequence[Request]) -> Request:
        """Remove and return the request to serve next, given the running ones.

        Requests whose grammars are late come last. Then follow the owner with the fewest running requests, the owner whose last
        turn was earliest, and the owner's most urgent request.
        """
        counts = Counter(request.owner for request in running)
        request = min(
            self._waiting,
            key=lambda each: (
                not each.ready(patient=False),
                counts[each.owner],
                self._turns.get(each.owner, -1),
                each.priority,
            ),
        )
        self._waiting.remove(request)
        present = {each.owner for each in (*self._waiting, *running)}
        turn = max(self._turns.values(), default=-1) + 1
        self._turns = {owner: last for owner, last in self._turns.items() if owner in present} | {request.owner: turn}
        return request
