"""The rounds of all requests that decode: together or, if the first stages of the target run in other processes, in two halves.

together   draft, run all stages, verify; the stages wait for this process, and it for them
in halves  while one half is in the first stages, this process ends the round of the other half, and begins its next one

A half is computed as it would be if its requests were the only ones. A pass travels to the other processes at once, but what
else changes their caches travels with the next pass, and the last stage does it at once. So rounds are in halves only while
nothing else happens, and each half has a range of slots to itself: a pass also writes to unused slots between those in use.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.errors import EngineError
from outrider.runtime.decoder import Decoder
from outrider.runtime.policy.policy import Policy
from outrider.runtime.request import Request
from outrider.runtime.rounds.rounds import RoundResult

Decided = list[tuple[Request, RoundResult | EngineError]]


class Alternation:
    """Runs rounds, and what must run again if one fails."""

    def __init__(self, decoder: Decoder, policy: Policy, drafters: Sequence[str]):
        """Draft with these drafters, as the policy says."""
        decoder.abandon()
        self._decoder, self._policy, self._drafters = decoder, policy, drafters

    @property
    def begun(self) -> list[Request]:
        """The requests in rounds that have begun."""
        return [request for each in self._decoder.begun for request in each.requests]

    def run(self, requests: list[Request], alone: bool) -> Decided:
        """Run a round of requests, or begin it and end another one.

        Args:
            requests: those to decode, of the ones that are in no round.
            alone: whether nothing but rounds happens now. Otherwise no round may have begun.

        Returns:
            the requests of the rounds that ended, and their results.
        """
        if not self._decoder.begun and not (alone and self._decoder.halves and len(requests) > 1):
            return self._round(requests)
        decided: Decided = []
        for half in self._halves(requests):
            try:
                self._decoder.begin(half, self._policy, self._drafters)
            except EngineError as error:
                decided += self._failed(half, error)
        return decided + self.end()

    def end(self) -> Decided:
        """End the round that has begun first, if there is one."""
        if not self._decoder.begun:
            return []
        requests = self._decoder.begun[0].requests
        try:
            return [*zip(requests, self._decoder.conclude(), strict=True)]
        except EngineError as error:
            return self._failed(requests, error)

    def _halves(self, requests: list[Request]) -> list[list[Request]]:
        """Return the half that can begin beside the round that has begun, or both if there is none. If these requests are no
        half, nothing begins: all are halved again when the other round has ended."""
        places, begun = sorted(map(_place, requests)), sorted(map(_place, self.begun))
        if not begun:
            middle = places[(len(places) + 1) // 2]
            lower = [request for request in requests if _place(request) < middle]
            return [lower, [request for request in requests if request not in lower]]
        apart = bool(places) and (places[-1] < begun[0] or begun[-1] < places[0])
        return [requests] if apart and abs(len(places) - len(begun)) <= 1 else []

    def _round(self, requests: list[Request]) -> Decided:
        try:
            results = self._decoder.round(requests, self._policy, self._drafters)
        except EngineError as error:
            return self._failed(requests, error)
        return list(zip(requests, results, strict=True))

    def _failed(self, requests: Sequence[Request], error: EngineError) -> Decided:
        """Return the error of a lone request. Otherwise the backend failed perhaps because of one request: run each alone."""
        if len(requests) == 1:
            return [(requests[0], error)]
        decided: Decided = []
        while self._decoder.begun:
            decided += self.end()
        return decided + [result for request in requests for result in self._again(request)]

    def _again(self, request: Request) -> Decided:
        """Run a request's round alone, after a round with others has failed."""
        assert request.slot is not None
        try:
            self._decoder.slots.restore(request.slot)
        except EngineError as error:
            return [(request, error)]
        return self._round([request])


def _place(request: Request) -> int:
    assert request.slot is not None
    return request.slot.index
