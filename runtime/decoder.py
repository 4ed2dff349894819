"""The draft-verify loop over the slots of a bundle. It knows no backend and no particular drafter.

draft     the drafter proposes tokens, before the round or inside it
verify    one pass of the target over the last confirmed token and the drafted ones
accept    the longest prefix that the target agrees with, and one token of its own
commit    the confirmed tokens grow; everything behind them in the caches is overwritten by later rounds
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from outrider.engines.session import Session
from outrider.errors import EngineError
from outrider.runtime.cache.slot import Slot
from outrider.runtime.cache.slots import Slots
from outrider.runtime.drafters.base import DeviceDrafter, Drafter
from outrider.runtime.grammar.errors import GrammarError
from outrider.runtime.policy.choice import NONE, PLAIN, Choice, EarlyStop
from outrider.runtime.policy.policy import Offer, Policy, SequenceView
from outrider.runtime.request import Request
from outrider.runtime.rounds.buffers import Lane
from outrider.runtime.rounds.rounds import RoundResult


class Runner(Protocol):
    """What runs the rounds: `Rounds`, or a simulation."""

    def run(
        self, lanes: Sequence[Lane], rows: int, *, first: int = 0, drafter: str = NONE, stop: EarlyStop | None = None
    ) -> list[RoundResult | EngineError | None]:
        """Run one round; see `Rounds.run`."""


class Decoder:
    """Runs rounds for the requests in the slots of the sessions."""

    def __init__(
        self,
        target: Session,
        rounds: Runner,
        drafters: Mapping[str, Drafter],
        k: Sequence[int],
        max_prompt_chunk: int,
        clock: Callable[[], float] = time.perf_counter,
        engine_seconds: Callable[[], float] = lambda: 0.0,
    ):
        """Decode with the built numbers of draft tokens `k`. `clock` returns seconds, `engine_seconds` how long engines have
        run so far."""
        self.target = target
        self.rounds = rounds
        self.drafters = drafters
        self.slots = Slots(target, drafters, max_prompt_chunk)
        self._on_device = {name: drafter for name, drafter in drafters.items() if isinstance(drafter, DeviceDrafter)}
        self._k = sorted({0, *k})
        self.clock = clock
        self._engine_seconds = engine_seconds

    def round(
        self, requests: Sequence[Request], policy: Policy, names: Sequence[str], chunks: int | None = None
    ) -> list[RoundResult | EngineError]:
        """Draft for requests whose prompts are read, and verify in one pass of the target.

        Never emits more tokens than remain to a request: near its end fewer are drafted, and the rows left over in the built
        shape are padding.

        Args:
            names: the drafters that may be used.
            chunks: how much of a text a drafter may process before the round; a request whose drafter has more to catch up
                with drafts nothing in this round. None is all of it.

        Raises:
            EngineError: the backend failed; nothing was confirmed.
        """
        slots = [slot for request in requests if (slot := request.slot) is not None]
        batched = len(requests) > 1
        views = [self._view(request, slot, names, batched) for request, slot in zip(requests, slots, strict=True)]
        choice, counts = self._plan(policy, requests, slots, views, chunks)
        lanes, first = self._lanes(choice, requests, slots, views, counts)
        stop = policy.early_stop(choice, views[0]) if len(views) == 1 and choice.drafter in self._on_device else None
        self.slots.synchronize()  # what was launched before must not count towards the time of this round
        started = self.clock()
        decided = self.rounds.run(lanes, choice.k + 1, first=first, drafter=choice.drafter, stop=stop)
        milliseconds = 1000 * (self.clock() - started)
        results = [result for slot in slots if (result := decided[slot.index - first]) is not None]
        done = [result if isinstance(result, RoundResult) else None for result in results]
        if any(done):
            if stop is not None and done[0] is not None:
                count = len(done[0].drafted)
                choice = Choice(choice.drafter, self._size(count)) if count else PLAIN
            policy.observe(choice, views, done, milliseconds)
        for index, (request, slot, result) in enumerate(zip(requests, slots, done, strict=True)):
            if result is not None:
                try:
                    self._commit(choice, request, slot, result)
                except GrammarError as error:
                    results[index] = error
        return results

    def _view(self, request: Request, slot: Slot, names: Sequence[str], batched: bool) -> SequenceView:
        try:
            offers = self._offers(request, slot, names, batched)
        except GrammarError:  # its mask fails as well, and that ends this request alone
            offers = {}
        length, emitted = len(request.tokens), request.stats.emitted
        return SequenceView(length, emitted, request.limit - emitted, request.sampling.greedy, offers, request.acceptance)

    def _offers(self, request: Request, slot: Slot, names: Sequence[str], batched: bool) -> dict[str, Offer]:
        """Return what drafters can do for a request."""
        offers, index, tokens, grammar = {}, slot.index, request.tokens, request.sampling.grammar
        for name in names:
            drafter = self.drafters[name]
            if not drafter.can_draft(len(tokens), batched):
                continue
            if name in self._on_device:
                offers[name] = Offer(drafter.pending(index, tokens), None)
            elif (proposal := drafter.propose(index, tokens, self._k[-1], grammar)) is not None:
                if grammar is not None and not proposal.allowed:
                    proposal = proposal._replace(tokens=proposal.tokens[: grammar.valid(proposal.tokens)])
                if proposal.tokens:
                    offers[name] = Offer(drafter.pending(index, tokens), proposal)
        return offers

    def _plan(
        self,
        policy: Policy,
        requests: Sequence[Request],
        slots: Sequence[Slot],
        views: Sequence[SequenceView],
        chunks: int | None,
    ) -> tuple[Choice, list[int]]:
        """Let the drafter catch up, and return what can be drafted: the choice with the smallest built k that is needed, and
        the number of tokens to draft for each request."""
        choice = policy.choose(views)
        if not choice.k:
            return PLAIN, [0] * len(requests)
        first, last = min(slot.index for slot in slots), max(slot.index for slot in slots)
        longest = max([slot.cached + 1 for slot in self.slots.between(first, last)])
        room = self.target.capacity - longest  # rows that fit behind the last confirmed token's own
        built = [size for size in self._k if size <= min(choice.k, room)]
        most = max([view.remaining for view in views]) - 1
        limit = next((size for size in built if size >= most), built[-1])
        counts = []
        for request, slot, view in zip(requests, slots, views, strict=True):
            count, offer = min(limit, view.remaining - 1), view.offers.get(self._drafting(choice, view))
            if offer is None:
                count = 0
            elif offer.proposal is not None:
                count = min(count, len(offer.proposal.tokens))
            if count and offer is not None and offer.pending:
                ready = policy.worth_catching_up(choice, view) and self._catch_up(choice.drafter, request, slot, chunks)
                count = count if ready else 0
            counts.append(count)
        return (Choice(choice.drafter, self._size(max(counts))), counts) if any(counts) else (PLAIN, counts)

    def _drafting(self, choice: Choice, view: SequenceView) -> str:
        """Return the name of what drafts for a sequence in a round."""
        return choice.drafter if choice.drafter in self._on_device else view.proposer(choice.drafter) or NONE

    def _catch_up(self, name: str, request: Request, slot: Slot, chunks: int | None) -> bool:
        """Return whether the drafter has processed all tokens."""
        drafter, stats, started, engines = self.drafters[name], request.stats, self.clock(), self._engine_seconds()
        self.slots.catch_up(slot, drafter, chunks)
        if not stats.rounds:  # then it reads the prompt, which is not part of the rounds' time
            self.slots.synchronize()
            seconds = self.clock() - started
            stats.draft_prompt_seconds += seconds
            stats.prompt_seconds += seconds
            stats.engine_seconds -= self._engine_seconds() - engines  # the scheduler adds it with that of the round
        return not drafter.pending(slot.index, request.tokens)

    def _lanes(
        self,
        choice: Choice,
        requests: Sequence[Request],
        slots: Sequence[Slot],
        views: Sequence[SequenceView],
        counts: Sequence[int],
    ) -> tuple[list[Lane], int]:
        """Return the lanes of a round, one for each slot from the first to the last one in use, and the first slot."""
        first, last = min(slot.index for slot in slots), max(slot.index for slot in slots)
        lanes = [Lane([], None, NONE, 0, [], slot.cached) for slot in self.slots.between(first, last)]
        for request, slot, view, count in zip(requests, slots, views, counts, strict=True):
            drafter = self._drafting(choice, view) if count else NONE
            proposal = view.offers[drafter].proposal if count else None
            proposed = [] if proposal is None else proposal.tokens[:count]
            position = len(request.tokens) - 1
            on_device = self._on_device.get(drafter)
            missing = 0 if on_device is None else on_device.missing(slot.index, request.tokens)
            lanes[slot.index - first] = Lane(request.tokens, request.sampling, drafter, count, proposed, position, missing)
        return lanes, first

    def _commit(self, choice: Choice, request: Request, slot: Slot, result: RoundResult) -> None:
        request.sampling.advance(result.tokens)
        if choice.drafter in self.drafters:
            self.drafters[choice.drafter].commit(slot.index, request.tokens, result.drafted)
        request.tokens += result.tokens
        slot.cached, slot.finite = len(request.tokens) - 1, True

    def _size(self, drafted: int) -> int:
        """The smallest built k that holds so many drafted tokens."""
        return next(size for size in self._k if size >= drafted)
