"""When a draft reads a text, and how much of it: only its end where the rest would cost more time than it saves."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from outrider.bench.simulator import SimulatedSession, Trace, replay
from outrider.errors import EngineError
from outrider.runtime.decoder import Decoder
from outrider.runtime.drafters.base import Reading, Resources
from outrider.runtime.drafters.model import ModelDrafter
from outrider.runtime.policy.adaptive import AdaptivePolicy
from outrider.runtime.policy.choice import NONE, PLAIN, Choice
from outrider.runtime.policy.lengths import AnswerLengths
from outrider.runtime.policy.policy import FixedPolicy, Offer, Policy, SequenceView
from outrider.runtime.rounds.rounds import RoundResult
from outrider.tests.runtime.policies import MODEL, adaptive, costs, flips, observe, text, view

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
    policy, lengths = adaptive(costs(acceptance=0.9)), AnswerLengths()
    for _ in range(20):
        lengths.observe(1000)
    later = offering(policy, [Reading(64, 0), Reading(0, LONG - 2)], 1000)._replace(lengths=lengths)
    assert read(policy, later) == Reading(0, LONG - 2), "another request's reading is no choice of this one"
    drafted(policy, later, 2, 1)
    assert read(policy, later) == Reading(64, 0)
    drafted(policy, later, 0, 20)
    assert read(policy, later) in (None, Reading(64, 0))


def test_a_reading_holds_while_a_few_tokens_are_pending() -> None:
    policy = adaptive(costs(acceptance=0.9))
    behind = offering(policy, [Reading(64, 3), Reading(0, LONG - 2)], 1000)
    drafted(policy, behind, 1, 1)
    policy.choose([behind])
    assert policy.reading(Choice(MODEL, 4), behind) == Reading(64, 3)
    whole = offering(policy, [Reading(0, 67), Reading(64, 62)], 1000)
    drafted(policy, whole, 0, 8)
    policy.choose([whole])
    assert policy.reading(Choice(MODEL, 4), whole) == Reading(0, 67)


@pytest.fixture
def drafter() -> ModelDrafter:
    """A draft model for three slots, without computing anything."""
    session = SimulatedSession(lambda rows, end: None)
    return ModelDrafter(Resources(defaultdict(lambda: session), 3, 64, [4], windowed=True))


def test_a_whole_reading_in_pieces_is_not_replaced_by_the_end_of_the_text_in_another_slot(drafter: ModelDrafter) -> None:
    tokens = list(range(LONG))
    drafter.catch_up(0, tokens, 256, LONG)
    assert [drafter.offset(0), len(drafter.written(0))] == [LONG - 256, 254]
    left = list[int]()
    while not left or left[-1]:
        drafter.copy(0, 1, LONG)
        drafter.catch_up(1, [*tokens, 1, 2], 0, 64)
        left.append(drafter.pending(1, [*tokens, 1, 2]))
        assert len(left) < 40
    assert left == [*range(LONG - 64, 0, -64), 0]


def test_the_end_of_a_text_is_not_replaced_by_a_shorter_beginning(drafter: ModelDrafter) -> None:
    tokens = list(range(LONG))
    drafter.catch_up(0, tokens[:300], 0, LONG)
    drafter.catch_up(1, tokens[: LONG - 3], 64, LONG)
    drafter.copy(0, 1, 300)
    assert drafter.readings(1, tokens)[0] == Reading(64, 3)


def test_a_text_that_keeps_less_than_a_window_is_read_anew(drafter: ModelDrafter) -> None:
    tokens = list(range(LONG))
    drafter.catch_up(0, tokens, 256, LONG)
    drafter.truncate(0, LONG - 10)
    assert drafter.readings(0, tokens)[0] == Reading(0, LONG - 2)


@pytest.mark.parametrize("policy", [FixedPolicy(MODEL, 4), adaptive(costs(draft=2.0, acceptance=0.9))])
def test_no_token_waits_for_more_than_two_plain_rounds_while_a_draft_reads(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that takes the draft 73 ms, 12 plain rounds."""
    table, waits, run = costs(draft=2.0), list[tuple[bool, float]](), Decoder.round

    def timed(decoder: Decoder, *given: Any) -> list[RoundResult | EngineError]:
        before = decoder.clock()
        (result,) = run(decoder, *given)
        waits.append((isinstance(result, RoundResult) and bool(result.drafted), 1000 * (decoder.clock() - before)))
        return [result]

    monkeypatch.setattr(Decoder, "round", timed)
    replay(text(flips(0.9, 200), prompt=500), table, policy)
    drafting = [drafted for drafted, _ in waits].index(True)
    plain = table.round(NONE, 0, 0, 64, True)
    assert drafting > 12
    assert waits[0][1] == pytest.approx(plain), "nothing is read before the first token"
    assert sum([wait > 1.7 * plain for _, wait in waits[:drafting]]) >= 12
    assert max(wait for _, wait in waits[:drafting]) <= 2 * plain
    assert waits[drafting][1] <= plain + table.round(MODEL, 8, 8, 64, True)


def test_a_draft_that_is_tried_again_reads_all_of_a_prompt_for_it() -> None:
    """It was useless so far, and is now always right. It reads a prompt of 300 tokens in four pieces."""
    table, bad, good = costs(), text(flips(0.0, 300), prompt=300), text(flips(1.0, 1000), prompt=300)
    policy, plain = adaptive(table), replay(good, table, FixedPolicy(NONE, 0))
    for _ in range(4):
        replay(bad, table, policy)
    assert sum(replay(good, table, policy) for _ in range(4)) < 4 * plain / 1.5


def test_a_window_that_was_not_recorded_is_the_whole_prompt() -> None:
    """It is longer than the prompt, and is offered when the text has grown."""
    made = text([False] * 300, prompt=40)
    trace = Trace(
        "", made.prompt, made.tokens, made.agrees | {"model@16": [False] * 300}, made.confidences | {"model@16": [0.0] * 300}
    )
    table = costs(acceptance=0.9, draft=0.4)
    policy = adaptive(table)
    for _ in range(10):
        assert replay(trace, table, policy)


def test_a_draft_that_only_the_end_of_a_prompt_makes_right_reads_that() -> None:
    made = text([False] * 200, prompt=60)
    trace = Trace(
        "", made.prompt, made.tokens, made.agrees | {"model@16": [True] * 200}, made.confidences | {"model@16": [1.0] * 200}
    )
    table, taken = costs(acceptance=0.5), list[float]()
    policy = adaptive(table)
    for _ in range(3):
        taken.append(replay(trace, table, policy))
    assert taken[-1] < 0.5 * replay(trace, table, FixedPolicy(NONE, 0))
