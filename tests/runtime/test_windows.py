"""Which part of a text a draft reads: only texts' ends where the rest would cost more time than it saves."""

from __future__ import annotations

from outrider.runtime.drafters.base import Reading
from outrider.runtime.policy.adaptive import AdaptivePolicy
from outrider.runtime.policy.choice import PLAIN, Choice
from outrider.runtime.policy.policy import Offer, SequenceView
from outrider.tests.runtime.policies import MODEL, adaptive, costs, observe, view

LONG = 2000
UNREAD = [Reading(0, LONG - 2), Reading(64, 62), Reading(128, 126)]


def offering(policy: AdaptivePolicy, readings: list[Reading], remaining: int = 100) -> SequenceView:
    return view(policy, LONG, remaining, emitted=0)._replace(offers={MODEL: Offer(readings, None)})


def read(policy: AdaptivePolicy, sequence: SequenceView) -> Reading | None:
    choice = policy.choose([sequence])
    return policy.reading(choice, sequence) if choice.k else None


def test_a_draft_reads_the_end_of_a_prompt_that_would_take_too_long() -> None:
    """All of it takes 145 ms, which an answer of 20 tokens does not give back. The costs know no longer passes."""
    policy = adaptive(costs(acceptance=0.9))
    assert read(policy, offering(policy, UNREAD[:1], 20)) is None
    assert read(policy, offering(policy, UNREAD, 20)) == UNREAD[1]


def drafted(policy: AdaptivePolicy, sequence: SequenceView, accepted: int, rounds: int) -> None:
    """Let rounds draft four tokens each, and plain ones in between, so that their pace is known."""
    table = costs()
    for _ in range(rounds):
        observe(policy, Choice(MODEL, 4), sequence, 4, accepted, table.round(MODEL, 4, 4, LONG, True))
        observe(policy, PLAIN, sequence, 0, 0, table.round(MODEL, 0, 0, LONG, True))


def test_it_learns_how_much_must_be_read() -> None:
    policy = adaptive(costs(acceptance=0.9))
    ends = [offering(policy, [Reading(window, 0), Reading(0, LONG)]) for window in (64, 128)]
    drafted(policy, ends[0], 0, 20)
    drafted(policy, ends[1], 4, 20)
    assert read(policy, offering(policy, UNREAD, 60)) == UNREAD[2]
    for end in ends:
        drafted(policy, end, 0, 200)
    assert read(policy, offering(policy, UNREAD, 1000)) == UNREAD[0]
    assert read(policy, offering(policy, UNREAD, 20)) is None


def test_a_reading_holds_for_the_rest_of_the_answer() -> None:
    policy = adaptive(costs(acceptance=0.9))
    later = offering(policy, [Reading(64, 0), Reading(0, LONG - 2)], 1000)
    assert read(policy, later) == Reading(0, LONG - 2), "another request's reading is no choice of this one"
    drafted(policy, later, 2, 1)
    assert read(policy, later) == Reading(64, 0)
    drafted(policy, later, 0, 20)
    assert read(policy, later) in (None, Reading(64, 0))
