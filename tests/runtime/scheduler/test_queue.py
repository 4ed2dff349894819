"""Who gets a slot next: the order and the limit of the queue, and the shares of owners."""

from __future__ import annotations

import pytest

from outrider.errors import UsageError
from outrider.runtime.generation import Event, Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.request_queue import QueueFullError
from outrider.runtime.scheduler import Scheduler
from outrider.tests.runtime.scheduler.schedules import CAPACITY, SLOTS


def test_the_queue_is_limited_and_served_in_order(batched: Outrider) -> None:
    scheduler = Scheduler(batched, k=0, max_waiting=2)
    prompt = batched.text.encode("Once", chat=False)
    requests = [scheduler.submit(prompt, SamplingParams(max_new_tokens=3)) for _ in range(SLOTS + 2)]
    with pytest.raises(QueueFullError, match="6 requests are waiting"):
        scheduler.submit(prompt, SamplingParams())
    with pytest.raises(UsageError, match="exceed the capacity"):
        scheduler.submit_all([(prompt, SamplingParams())] * (SLOTS + 3))
    scheduler.step()
    assert (scheduler.load.running, scheduler.load.waiting) == (SLOTS, 2)
    with pytest.raises(QueueFullError):
        scheduler.submit_all([(prompt, SamplingParams())] * 2)  # all or none
    assert scheduler.load.waiting == 2
    scheduler.cancel(requests[0])
    assert (scheduler.load.running, scheduler.load.waiting) == (SLOTS - 1, 2)
    ended = []
    while scheduler.busy:
        ended += [request for request, event in scheduler.step() if isinstance(event, Event) and event.finish_reason]
    assert ended == requests[1:]


def test_the_most_urgent_of_an_owner_come_first_and_are_displaced_last(batched: Outrider) -> None:
    """As with vLLM's priority: the lowest first. It gains nothing against other owners."""
    scheduler = Scheduler(batched, max_waiting=4)
    one = [(batched.text.encode("Once", chat=False), SamplingParams(max_new_tokens=4))]
    running = [scheduler.submit_all(one, "a", priority=9)[0] for _ in range(SLOTS)]
    scheduler.step()
    waiting = {priority: scheduler.submit_all(one, "a", priority)[0] for priority in (3, -1, 2, 7)}
    other = scheduler.submit_all(one, "b", priority=100)[0]
    assert scheduler.displaced == [waiting.pop(7)]
    for each in running:
        scheduler.cancel(each)
    ended = []
    while scheduler.busy:
        scheduler.step()
        for request in [*waiting.values(), other]:
            if request.admitted is not None and request not in ended:
                ended.append(request)
    # One slot each, in the order of their turns; then what is left.
    admitted = sorted([*waiting.values(), other], key=lambda each: each.admitted or 0.0)
    assert admitted == [other, waiting[-1], waiting[2], waiting[3]]


def test_owners_get_fair_shares_of_the_slots(batched: Outrider) -> None:
    """A free slot goes to the owner that runs the fewest; among these, owners take turns."""
    scheduler = Scheduler(batched)
    ids = batched.text.encode("Once", chat=False)
    params = SamplingParams(max_new_tokens=8, min_new_tokens=8)
    greedy = scheduler.submit_all([(ids, params)] * 12, "greedy")
    scheduler.step()
    late = [scheduler.submit(ids, params, owner) for owner in ("late", "later", "late")]
    scheduler.cancel(greedy[0])
    scheduler.step()
    assert [each.running for each in late] == [True, False, False]
    scheduler.cancel(greedy[1])
    scheduler.step()
    assert [each.running for each in late] == [True, True, False]
    scheduler.cancel(greedy[2])  # each runs one
    scheduler.step()
    assert (late[2].running, greedy[4].running) == (False, True)  # greedy's last turn was before late's
    while scheduler.busy:
        scheduler.step()
    assert all(each.finish_reason == "length" for each in (*late, *greedy[3:]))


def test_owners_take_turns_at_a_single_slot(tiny: Outrider) -> None:
    scheduler = Scheduler(tiny)
    params = SamplingParams(max_new_tokens=4, min_new_tokens=4)
    requests = {scheduler.submit([5, 6], params, "first"): f"first {at}" for at in range(4)}
    scheduler.step()
    requests |= {scheduler.submit([5, 6], params, "second"): f"second {at}" for at in range(2)}
    ended = []
    while scheduler.busy:
        ended += [requests[request] for request, event in scheduler.step() if isinstance(event, Event) and event.finish_reason]
    assert ended == ["first 0", "second 0", "first 1", "second 1", "first 2", "first 3"]


def test_a_full_queue_makes_room_for_an_owner_with_fewer_requests(batched: Outrider) -> None:
    scheduler = Scheduler(batched, max_waiting=6)
    request = (batched.text.encode("Once", chat=False), SamplingParams(max_new_tokens=3))
    scheduler.submit_all([request] * SLOTS, "greedy")
    scheduler.step()
    greedy = scheduler.submit_all([request] * 6, "greedy")
    with pytest.raises(QueueFullError):
        scheduler.submit(*request, "greedy")
    late = scheduler.submit_all([request] * 2, "late")
    assert scheduler.displaced == greedy[:3:-1]
    with pytest.raises(QueueFullError):  # all or none
        scheduler.submit_all([request] * 3, "later")
    assert scheduler.load.waiting == 6
    scheduler.submit(*request, "late")  # three each
    for owner in ("greedy", "late"):
        with pytest.raises(QueueFullError):
            scheduler.submit(*request, owner)
    others = [scheduler.submit(*request, owner) for owner in range(4)]  # one each
    with pytest.raises(QueueFullError):
        scheduler.submit(*request, "last")
    while scheduler.busy:
        scheduler.step()
    assert all(each.finish_reason == "length" for each in (*late[:1], *greedy[:1], *others))


def test_answers_that_would_depend_on_the_batch_are_refused(batched: Outrider) -> None:
    scheduler = Scheduler(batched)
    with pytest.raises(UsageError, match="depends on how many tokens are drafted"):
        scheduler.submit([5], SamplingParams(temperature=1.0, seed=1, rule="rejection"))
    with pytest.raises(UsageError, match=f"capacity is {CAPACITY}"):
        scheduler.submit([5] * 200, SamplingParams())
    with pytest.raises(UsageError, match="k = 3 was not built"):
        Scheduler(batched, k=3)


def test_a_bundle_with_one_slot_serves_one_request_at_a_time(tiny: Outrider) -> None:
    scheduler = Scheduler(tiny)
    want = [token for event in tiny.generate([5, 6], SamplingParams(max_new_tokens=20)) for token in event.token_ids]
    requests = [scheduler.submit([5, 6], SamplingParams(max_new_tokens=20)) for _ in range(3)]
    got: dict[int, list[int]] = {id(request): [] for request in requests}
    while scheduler.busy:
        for request, event in scheduler.step():
            assert isinstance(event, Event)
            got[id(request)] += event.token_ids
    assert list(got.values()) == [want] * 3
    with pytest.raises(UsageError, match="built for a batch of 1, not 2"):
        Outrider.load(tiny.engines.folder, slots=2)
