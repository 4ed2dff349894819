"""The draft-verify loop over the slots of a bundle, independent of backends and drafters.

draft     the drafter proposes tokens, before the round or inside it
verify    one pass of the target over the last confirmed token and the drafted ones
accept    the longest prefix that the target agrees with, and one token of its own
commit    the confirmed tokens grow; later rounds overwrite the cache entries after them
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from typing import NamedTuple, Protocol

from outrider.engines.session import Session
from outrider.errors import EngineError
from outrider.runtime.cache.slot import Slot
from outrider.runtime.cache.slots import Slots
from outrider.runtime.drafters.base import DeviceDrafter, DraftContext, Drafter
from outrider.runtime.grammar.errors import GrammarError
from outrider.runtime.policy.choice import NONE, PLAIN, Choice
from outrider.runtime.policy.early_stop import EarlyStop
from outrider.runtime.policy.policy import Observation, Offer, Policy, SequenceView
from outrider.runtime.request import BegunReading, Request
from outrider.runtime.rounds.buffers import Lane, RoundState
from outrider.runtime.rounds.rounds import RoundResult, Rounds


class Runner(Protocol):
    """Runs rounds: `Rounds`, or a simulation."""

    def run(
        self, lanes: Sequence[Lane], rows: int, *, first: int = 0, drafter: str = NONE, stop: EarlyStop | None = None
    ) -> list[RoundResult | EngineError | None]:
        """Run one round; see `Rounds.run`."""


class Active(NamedTuple):
    """A request that takes part in a round."""

    request: Request
    slot: Slot
    view: SequenceView


class Planned(NamedTuple):
    """What a round does, and for whom."""

    active: Sequence[Active]
    views: Sequence[SequenceView]
    choice: Choice
    lanes: Sequence[Lane]
    lowest: int  # slot of the first lane
    stop: EarlyStop | None


class Begun(NamedTuple):
    """A round that has begun."""

    planned: Planned
    rounds: Rounds
    state: RoundState
    policy: Policy
    seconds: float  # that its beginning took

    @property
    def requests(self) -> list[Request]:
        """Those that take part."""
        return [each.request for each in self.planned.active]


class Decoder:
    """Runs rounds for the requests in the slots of the sessions."""

    def __init__(
        self,
        target: Session,
        rounds: Runner,
        drafters: Mapping[str, Drafter],
        k: Sequence[int],
        max_prompt_chunk: int,
        piece: Callable[[str, int], int],
        clock: Callable[[], float] = time.perf_counter,
        halves: Sequence[Rounds] = (),
    ):
        """Decode with the built k.

        Args:
            piece: `RoundCosts.piece`.
            clock: returns seconds.
            halves: rounds that may overlap, each with launches of its own; two if the target `overlaps`, or none.
        """
        self.target = target
        self.rounds = rounds
        self.halves = halves
        self.begun = deque[Begun]()
        self.drafters = drafters
        self.slots = Slots(target, drafters, max_prompt_chunk)
        self._on_device = {name: drafter for name, drafter in drafters.items() if isinstance(drafter, DeviceDrafter)}
        self._k = sorted({0, *k})
        self._piece = piece
        self.clock = clock

    def round(self, requests: Sequence[Request], policy: Policy, names: Sequence[str]) -> list[RoundResult | EngineError]:
        """Draft for requests whose prompts are read, and verify in one pass of the target.

        A round never emits more tokens than a request may still get. Near its end fewer are drafted, and unused rows of the
        built shape are padding, or left out.

        Args:
            names: the drafters that may be used.

        Raises:
            EngineError: the backend failed; nothing was confirmed.
        """
        planned, started = self._prepare(requests, policy, names), self.clock()
        choice, first = planned.choice, planned.lowest
        decided = self.rounds.run(planned.lanes, choice.k + 1, first=first, drafter=choice.drafter, stop=planned.stop)
        return self._conclude(planned, decided, policy, self.clock() - started)

    def begin(self, requests: Sequence[Request], policy: Policy, names: Sequence[str]) -> None:
        """Begin a round of a half of the requests, which `conclude` ends. Arguments and errors are those of `round`."""
        rounds = next(each for each in self.halves if all(each is not other.rounds for other in self.begun))
        planned, started = self._prepare(requests, policy, names), self.clock()
        choice, first = planned.choice, planned.lowest
        state = rounds.begin(planned.lanes, choice.k + 1, first=first, drafter=choice.drafter, stop=planned.stop)
        self.begun.append(Begun(planned, rounds, state, policy, self.clock() - started))

    def conclude(self) -> list[RoundResult | EngineError]:
        """End the round that has begun first, and return what `round` does.

        The policy sees the time of its two parts, without what another half did in between.

        Raises:
            EngineError: the backend failed; nothing was confirmed.
        """
        begun, started = self.begun.popleft(), self.clock()
        decided = begun.rounds.finish(begun.state)
        return self._conclude(begun.planned, decided, begun.policy, begun.seconds + self.clock() - started)

    def abandon(self) -> None:
        """End the rounds that have begun, and drop what they give."""
        while self.begun:
            begun = self.begun.popleft()
            with suppress(Exception):  # after a crash, it may end with the same one
                begun.rounds.finish(begun.state)

    def _prepare(self, requests: Sequence[Request], policy: Policy, names: Sequence[str]) -> Planned:
        batched = len(requests) > 1
        unfinished = [request for request in requests if request.reading is not None]
        for request in unfinished[:1]:
            self._read(request)
        reading = {request.reading.drafter for request in unfinished if request.reading is not None}
        active = [self._active(request, names, batched, reading) for request in requests]
        indexes = [each.slot.index for each in active]
        used = self.slots.between(min(indexes), max(indexes))
        choice, own, views = self._plan(policy, active, used, bool(unfinished))
        lanes = self._lanes(choice, own, active, used)
        stop = policy.early_stop(choice, views[0]) if len(views) == 1 and choice.drafter in self._on_device else None
        self.slots.synchronize()  # earlier launches must not count towards the time of this round
        return Planned(active, views, choice, lanes, min(indexes), stop)

    def _conclude(
        self, planned: Planned, decided: Sequence[RoundResult | EngineError | None], policy: Policy, seconds: float
    ) -> list[RoundResult | EngineError]:
        active, views, choice, _, lowest, stop = planned
        results = [result for each in active if (result := decided[each.slot.index - lowest]) is not None]
        done = [result if isinstance(result, RoundResult) else None for result in results]
        if any(done):
            ran, begun = choice, 0
            if stop is not None and done[0] is not None:  # the pass had the smallest k for what was drafted
                ran, begun = Choice(choice.drafter, self._size(len(done[0].drafted))), choice.k
            policy.observe(Observation(ran, views, done, 1000 * seconds, begun))
        for index, (each, result) in enumerate(zip(active, done, strict=True)):
            if result is not None:
                try:
                    self._commit(choice, each.request, each.slot, result)
                except GrammarError as error:
                    results[index] = error
        return results

    def finish(self, request: Request) -> None:
        """Note that a request has ended, while it has its slot."""
        assert request.slot is not None
        if request.finish_reason == "stop":  # another one would have been longer
            request.lengths.observe(request.stats.emitted)
        context = _context(request, request.slot)
        context = context._replace(tokens=request.tokens[: context.prompt + request.stats.emitted])  # up to the end of the text
        for drafter in self.drafters.values():
            drafter.finish(context)

    def _active(self, request: Request, names: Sequence[str], batched: bool, reading: Set[str]) -> Active:
        slot = request.slot
        assert slot is not None
        try:
            offers = self._offers(request, slot, names, batched, reading)
        except GrammarError:  # its mask fails too, which ends this request alone
            offers = {}
        length, emitted = len(request.tokens), request.stats.emitted
        remaining, greedy = request.limit - emitted, request.sampling.greedy
        view = SequenceView(length, emitted, remaining, greedy, offers, request.acceptance, request.lengths)
        return Active(request, slot, view)

    def _offers(self, request: Request, slot: Slot, names: Sequence[str], batched: bool, reading: Set[str]) -> dict[str, Offer]:
        """Return what drafters offer for a request. Those in `reading` read for one request at a time."""
        offers, index, tokens, grammar = {}, slot.index, request.tokens, request.sampling.grammar
        context = _context(request, slot)
        for name in names:
            drafter = self.drafters[name]
            if not drafter.can_draft(len(tokens), batched):
                continue
            if name in self._on_device:
                readings = drafter.readings(index, tokens)
                if name not in reading or not readings[0].pending:
                    offers[name] = Offer(readings, None)
            elif (proposal := drafter.propose(context, self._k[-1])) is not None:
                if grammar is not None:
                    proposal = proposal._replace(tokens=proposal.tokens[: grammar.valid(proposal.tokens)])
                if proposal.tokens:
                    offers[name] = Offer(drafter.readings(index, tokens), proposal)
        return offers

    def _plan(
        self, policy: Policy, active: Sequence[Active], used: Sequence[Slot], read: bool
    ) -> tuple[Choice, list[Choice], list[SequenceView]]:
        """Let the drafter catch up. Return the choice with the smallest sufficient k, how each request drafts, and the views of
        the requests after it.

        A drafter reads a prompt after the first token of the answer, piece by piece before rounds, and before a round for one
        request: `read` is whether it was done.
        """
        views = [each.view for each in active]
        choice = policy.choose(views)
        if not choice.k:
            return PLAIN, [PLAIN] * len(active), views
        room = self.target.capacity - max([slot.cached + 1 for slot in used])  # rows that fit after the last confirmed token's
        built = [size for size in self._k if size <= min(choice.k, room)]
        left = max([each.view.remaining for each in active]) - 1
        limit = next((size for size in built if size >= left), built[-1])
        own = policy.each(choice, views)
        for index, ((request, _, view), (name, count)) in enumerate(zip(active, own, strict=True)):
            count, offer = min(count, limit, view.remaining - 1), view.offers.get(name)
            if offer is None:
                count = 0
            elif offer.proposal is not None:
                count = min(count, len(offer.proposal.tokens))
            if count and offer is not None and (len(offer.readings) > 1 or offer.readings[0].pending):
                reading = policy.reading(choice, view)
                behind = reading is None or reading.pending > 0 or reading.window != offer.window
                if behind and reading is not None and view.emitted and not read:
                    request.reading, read = BegunReading(name, reading.window), True
                    offer = self._read(request)
                    views[index] = view._replace(offers={**view.offers, name: offer})
                    behind = request.reading is not None
                count = 0 if behind else count
            own[index] = Choice(name, count) if count else PLAIN
        longest = max(each.k for each in own)
        if not longest:
            return PLAIN, own, views
        names = [each.drafter for each in own if each.k]
        return Choice(choice.drafter if choice.drafter in names else names[0], self._size(longest)), own, views

    def _read(self, request: Request) -> Offer:
        """Let a drafter read the next piece of a text. Return what it offers then."""
        slot, reading = request.slot, request.reading
        assert slot is not None
        assert reading is not None
        drafter = self.drafters[reading.drafter]
        piece = self._piece(reading.drafter, reading.window or len(request.tokens))
        self.slots.catch_up(slot, drafter, reading.window, piece)
        offer = Offer(drafter.readings(slot.index, request.tokens), None)
        request.reading = reading if offer.readings[0].pending else None
        return offer

    def _lanes(self, choice: Choice, own: Sequence[Choice], active: Sequence[Active], used: Sequence[Slot]) -> list[Lane]:
        """Return the lanes of a round, one for each slot from the first to the last in use."""
        lanes, first = [Lane([], None, NONE, 0, [], slot.cached) for slot in used], used[0].index
        on_device = self._on_device.get(choice.drafter)
        for (request, slot, view), (drafter, count) in zip(active, own, strict=True):
            proposal = view.offers[drafter].proposal if count else None
            proposed = [] if proposal is None else proposal.tokens[:count]
            position = len(request.tokens) - 1
            missing = 0 if on_device is None else on_device.missing(slot.index, request.tokens)
            at = slot.index - first
            lanes[at] = Lane(request.tokens, request.sampling, drafter, count, proposed, position, missing)
        return lanes

    def _commit(self, choice: Choice, request: Request, slot: Slot, result: RoundResult) -> None:
        request.sampling.advance(result.tokens)
        if choice.drafter in self.drafters:
            drafted = result.drafted if result.drafter == choice.drafter else []
            self.drafters[choice.drafter].commit(slot.index, request.tokens, drafted)
        request.tokens += result.tokens
        slot.cached, slot.finite = len(request.tokens) - 1, True

    def _size(self, drafted: int) -> int:
        """Return the smallest built k that has room for the drafted tokens."""
        return next(size for size in self._k if size >= drafted)


def _context(request: Request, slot: Slot) -> DraftContext:
    grammar, prompt = request.sampling.grammar, len(request.prompt)
    return DraftContext(slot.index, request.tokens, grammar, request.owner, prompt, request.params.memory)
