"""A beginning that requests have in common is read once, whichever slots they come to, and changes no token."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.audit.controls import RandomPolicy
from outrider.engines.session import Session
from outrider.errors import OutriderError
from outrider.runtime import drafters
from outrider.runtime.cache.slot import Slot
from outrider.runtime.cache.slots import MIN_SHARED, Slots
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.policy.choice import AUTO
from outrider.runtime.request import Request
from outrider.runtime.scheduler import Scheduler
from outrider.tests.deferred import deferred
from outrider.tests.runtime.serving import PARAMS, Asked, run, serve
from outrider.tests.support import build, make_endless

SLOTS, CAPACITY, CHUNK = 3, 255, 16  # with the spare position, a slot's cache begins at an aligned address
SYSTEM = [
    "The old man walked along the road, and the dog ran on before him. " * 3,
    "Customer: Hi, I would like to order a coffee and a piece of cake.\nAgent: Of course. Which cake would you like?\n" * 2,
]
USERS = ["Then", "But the", "Customer: The one", "Question: Tom has 5 apples. How many", "T"]
KINDS: list[Any] = [  # a drafter beside the draft model, the precision and the backend
    "random head int4 onnxruntime",
    "random head int4 openvino",
    *(
        pytest.param(kind, marks=pytest.mark.slow)
        for kind in (
            "trained head int4 onnxruntime",
            "trained head int4 openvino",
            "random block int4 onnxruntime",
            "plain block int4 onnxruntime",
            "random parallel-head int4 onnxruntime",
            "trained parallel int4 openvino",
            "trained parallel int8 onnxruntime",
        )
    ),
]
Alone = Callable[[int, int], list[int]]


@pytest.fixture(scope="module", params=KINDS)
def bundle(
    request: pytest.FixtureRequest, drafter_exports: Callable[[str, str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A bundle in which a row has the same bits in any pass. No token ends the text."""
    drafter, precision, backend = request.param.rsplit(maxsplit=2)
    made = tmp_path_factory.mktemp("prefixes") / "bundle"
    sizes: dict[str, Any] = {"k": [1, 2, 4], "capacity": CAPACITY, "batch": SLOTS, "max_prompt_chunk": CHUNK}
    build(drafter_exports(precision, drafter), made, backend=backend, **sizes)
    make_endless(made)
    return made


@pytest.fixture(scope="module")
def batched(bundle: Path) -> Outrider:
    return Outrider.load(bundle, slots=None)


@pytest.fixture(scope="module")
def texts(batched: Outrider) -> list[list[int]]:
    """Every user's question after each system prompt, and after none."""
    return [batched.text.encode(system + user, chat=False) for system in (*SYSTEM, "") for user in USERS]


@pytest.fixture(scope="module")
def alone(bundle: Path, texts: list[list[int]]) -> Alone:
    """The answer to a text with some of the parameters, by plain decoding in a slot that holds nothing."""
    single = Outrider.load(bundle)

    @functools.cache
    def answer(text: int, params: int) -> list[int]:
        events = single.generate(texts[text], replace(PARAMS[params], max_new_tokens=25), k=0)
        return [token for event in events for token in event.token_ids]

    return answer


# System prompts in turns and at once, texts without one, and requests that are cancelled while they read or decode.
ARRIVALS: dict[int, list[Asked]] = {
    0: [(0, 0, None), (1, 1, None), (5, 2, 9)],
    3: [(2, 0, 1), (10, 1, None)],
    7: [(6, 1, None)],
    9: [(7, 0, None), (3, 2, None)],
    14: [(8, 1, 2), (11, 0, None), (0, 2, None), (9, 0, None)],
    40: [(4, 1, None), (12, 0, None), (5, 1, None), (0, 0, None), (9, 2, None)],
    60: [(13, 0, None), (14, 1, None), (1, 0, None)],
}


def wrong(served: list[tuple[Request, Asked, list[int]]], alone: Alone) -> int:
    """Return how many requests got other tokens than they get alone."""
    differ = 0
    for request, (text, params, stop), got in served:
        differ += got != alone(text, params)[: len(got)]
        assert len(got) == request.limit or (stop is not None and request.finish_reason is None)
    return differ


MODES = [
    *((k, None) for k in (0, 1, 2, 4)),
    *((4, name) for name in ("model", "ngram", "the other")),
    (AUTO, AUTO),
    ("at random", None),
]


def in_turn(case: dict[str, Any]) -> bool:
    """Each kind with every drafter and k at random, and in every other mode, in turn."""
    kind, mode = KINDS.index(case["bundle"]) if case["bundle"] in KINDS else 0, MODES.index((case["k"], case["drafter"]))
    return mode in (len(MODES) - 1, *range(kind % 2, len(MODES), 2))


@pytest.mark.in_turn(runs=in_turn)
@pytest.mark.parametrize(("k", "drafter"), MODES)
def test_each_gets_what_it_gets_alone(
    batched: Outrider, texts: list[list[int]], alone: Alone, k: int | str, drafter: str | None
) -> None:
    random = RandomPolicy(batched.adaptive_policy()) if k == "at random" else None
    name = next(name for name in batched.drafters if name not in ("model", "ngram")) if drafter == "the other" else drafter
    scheduler = Scheduler(batched, k=AUTO if random else k, drafter=name, policy=random)
    served = serve(scheduler, texts, ARRIVALS)
    assert wrong(served, alone) == 0
    assert sum(request.stats.copied_tokens > 0 for request, _, _ in served) >= 3
    for request, (text, _, _), _ in served:
        stats = request.stats
        assert 0 <= stats.copied_tokens <= stats.cached_tokens < len(texts[text])


def faulty(fault: str, copy: Callable[[int, int, int], None]) -> Callable[[int, int, int], None]:
    """Return `Session.copy` with a fault."""

    def copies(slot: int, to: int, length: int) -> None:
        if fault == "the last entry is not copied":
            copy(slot, to, length - 1)
        elif fault == "from another slot":
            copy(3 - slot - to, to, length)

    return copies


@pytest.mark.in_turn(runs=lambda case: case["bundle"] in KINDS[:2])  # one of each backend; no copy depends on the drafter
@pytest.mark.parametrize(
    "fault", ["the last entry is not copied", "from another slot", "nothing is copied", "a token too many"]
)
def test_a_wrong_copy_changes_tokens(
    batched: Outrider, texts: list[list[int]], alone: Alone, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test above would notice."""
    target = batched.sessions["target"]
    if fault == "a token too many":
        share = Slots.reusable
        monkeypatch.setattr(
            Slots, "reusable", lambda self, slot, prompt, owner: min(share(self, slot, prompt, owner) + 1, len(prompt) - 1)
        )
    else:
        monkeypatch.setattr(target, "copy", faulty(fault, target.copy))
    assert wrong(serve(Scheduler(batched, k=0), texts, ARRIVALS), alone) > 0


def test_a_slot_shares_what_its_caches_hold_and_no_more() -> None:
    """The last confirmed token of a text has no entry yet."""
    slot, text = Slot(0), [*range(200)]
    slot.tokens, slot.cached = text, 150
    for same in (0, 1, 63, 64, 65, 128, 149, 150, 151, 200):
        assert slot.shared([*text[:same], 999, *text], None) == min(same, 150)
        assert slot.shared(text[:same], None) == min(same, 150)


def test_requests_that_come_together_read_what_they_have_in_common_once(
    batched: Outrider, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target and the drafter alike: each chunk is read by one of them, and copied by the others."""
    scheduler = Scheduler(batched, k=4, drafter=batched.drafters[0])
    rows = dict.fromkeys(batched.sessions, 0)

    def counting(role: str, session: Session) -> None:
        write = session.write

        def counted(ids: np.ndarray, *rest: Any, **named: Any) -> None:
            rows[role] += ids.size
            write(ids, *rest, **named)

        monkeypatch.setattr(session, "write", counted)

    for role, session in batched.sessions.items():
        counting(role, session)
    requests = [scheduler.submit(text, SamplingParams(max_new_tokens=8)) for text in texts[:SLOTS]]
    run(scheduler, *requests)
    longest, tails = max(map(len, texts[:SLOTS])), 2 * SLOTS * CHUNK
    drafter = drafters.get(batched.drafters[0])
    assert 0 < rows["target"] <= longest + tails
    assert 0 < rows[drafter.role] <= longest + tails  # type: ignore[attr-defined]


@pytest.mark.parametrize("share", [False, True])
def test_owners_share_prefixes_only_if_they_are_to(batched: Outrider, texts: list[list[int]], share: bool) -> None:
    """Neither what is being read nor what was, and the answers are the same."""
    scheduler = Scheduler(batched, k=4, share_prefixes=share)
    params = SamplingParams(max_new_tokens=8)
    together = [scheduler.submit(texts[0], params, owner) for owner in ("one", "other")]
    run(scheduler, *together)
    after = [scheduler.submit(texts[0], params, owner) for owner in ("third", "one")]
    run(scheduler, *after)
    cached = [request.stats.cached_tokens >= MIN_SHARED for request in (*together, *after)]
    assert cached[1:] == [share, share, True]
    assert share or not cached[0]
    assert len({tuple(request.tokens) for request in (*together, *after)}) == 1


def test_a_request_copies_from_one_that_was_moved_or_is_cancelled(
    batched: Outrider, texts: list[list[int]], alone: Alone
) -> None:
    scheduler = Scheduler(batched, k=4)
    one_off = [scheduler.submit(text, SamplingParams(max_new_tokens=25)) for text in texts[10:12]]
    source = scheduler.submit(texts[0], SamplingParams(max_new_tokens=25))
    while not source.stats.emitted:
        scheduler.step()
    assert source.slot is not None
    assert source.slot.index == 2
    scheduler.cancel(one_off[1])
    scheduler.step()
    assert source.slot.index == 1  # moved into the gap
    reader = scheduler.submit(texts[1], SamplingParams(max_new_tokens=25))
    got: list[int] = []
    scheduler.step()
    assert reader.stats.copied_tokens >= MIN_SHARED
    scheduler.cancel(source)
    while reader.finish_reason is None:
        for request, event in scheduler.step():
            got += event.token_ids if request is reader and not isinstance(event, OutriderError) else []
    assert got == alone(1, 0)


def test_while_the_source_is_read_and_cancelled(batched: Outrider, texts: list[list[int]], alone: Alone) -> None:
    """Its slot is cleared, since nobody knows yet whether its caches contain NaN; what was copied stays."""
    scheduler = Scheduler(batched, k=4)
    source = scheduler.submit(texts[0], SamplingParams(max_new_tokens=25))
    scheduler.step()
    reader = scheduler.submit(texts[1], SamplingParams(max_new_tokens=25))
    scheduler.step()
    scheduler.step()
    assert source.slot is not None
    assert source.slot.unread
    assert reader.stats.copied_tokens >= MIN_SHARED
    scheduler.cancel(source)
    got: list[int] = []
    while scheduler.busy:
        for _, event in scheduler.step():
            got += getattr(event, "token_ids", [])
    assert got == alone(1, 0)


@pytest.mark.parametrize(
    "bundle",
    [
        "trained head int4 onnxruntime",  # whose first request is too short for its head to draft
        pytest.param("trained head fp32 onnxruntime", marks=pytest.mark.slow),
        pytest.param("random head int4 onnxruntime", marks=pytest.mark.slow),
        *(pytest.param(f"{each} int4 onnxruntime", marks=pytest.mark.slow) for each in ("plain block", "random parallel-head")),
    ],
    indirect=True,
)
def test_on_a_device_that_runs_ahead(bundle: Path, texts: list[list[int]], alone: Alone) -> None:
    """As a GPU does: copies wait in the queue with everything else."""
    queued = deferred(bundle, slots=SLOTS)
    for k in (0, 2, AUTO):
        served = serve(Scheduler(queued, k=k), texts, ARRIVALS)
        assert wrong(served, alone) == 0
        assert sum(request.stats.copied_tokens > 0 for request, _, _ in served) >= 3
