"""Which texts the slots keep for requests to come, which they give up, and what is copied of a text that fails later."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.errors import EngineError
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.scheduler import Scheduler
from outrider.tests.runtime.serving import run
from outrider.tests.support import BROKEN, build


def ask(scheduler: Scheduler, text: list[int]) -> int:
    """Answer one request, and return how many of its tokens were cached."""
    request = scheduler.submit(text, SamplingParams(max_new_tokens=3))
    run(scheduler, request)
    return request.stats.cached_tokens


@pytest.fixture(scope="module", params=["onnxruntime", "openvino"])
def four(request: pytest.FixtureRequest, tiny_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Outrider:
    """A bundle with four slots."""
    made = tmp_path_factory.mktemp("four") / "bundle"
    return Outrider.load(build(tiny_export, made, backend=request.param, batch=4), slots=None)


def numbered(begin: int, length: int) -> list[int]:
    """Return a text that has nothing in common with others."""
    return [begin, *(1 + (begin * at) % 60 for at in range(1, length))]


def test_one_off_requests_do_not_evict_what_others_have_in_common(four: Outrider) -> None:
    scheduler = Scheduler(four)
    system, other = numbered(7, 60), numbered(11, 60)
    assert ask(scheduler, [*system, 70]) == 0
    for at in range(3):  # it was used once, and three slots are left
        assert ask(scheduler, numbered(20 + at, 40)) == 0
    assert ask(scheduler, [*system, 71]) == 60
    for at in range(8):  # now two have had it in common
        assert ask(scheduler, numbered(30 + at, 40)) == 0
    assert ask(scheduler, [*system, 72]) == 60
    assert ask(scheduler, [*other, 70]) == 0
    for at in range(6):  # in turns
        assert ask(scheduler, [*(other, system)[at % 2], 73 - at]) == 60
        assert ask(scheduler, numbered(40 + at, 40)) == 0


def test_old_prefixes_make_room_for_new_ones(four: Outrider) -> None:
    """However often they were used."""
    scheduler = Scheduler(four)
    for number in range(4):
        system = numbered(7 + number, 60)
        assert [ask(scheduler, [*system, 70 + at]) for at in range(3)] == [0, 60, 60]
    new = numbered(50, 60)
    evicted = scheduler.load.evicted
    assert ask(scheduler, [*new, 70]) == 0
    assert scheduler.load.evicted - evicted >= 60
    assert ask(scheduler, [*new, 71]) == 60
    assert ask(scheduler, [*numbered(10, 60), 79]) == 60  # the latest
    assert ask(scheduler, [*numbered(7, 60), 79]) == 0  # the one that was used least recently


def test_a_conversation_keeps_its_slot(four: Outrider) -> None:
    """A request that continues a text takes that text's slot, and the others take their copies of the system prompt."""
    scheduler = Scheduler(four)
    system = numbered(7, 60)
    texts = [[*system, *numbered(20 + at, 30)] for at in range(4)]
    for turn in range(3):
        for at, text in enumerate(texts):
            assert ask(scheduler, text) >= (len(text) - 30 if turn else 60 * (at > 0))
            texts[at] = [*text, *numbered(70 + turn, 20)]


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_nothing_behind_what_is_copied_spoils_it(broken: Path, tmp_path: Path, backend: str) -> None:
    """The source fails later, at a token that leads to NaN. A masked NaN is a NaN to some kernels, so tokens before it in the
    same chunk are not safe either."""
    scheduler = Scheduler(Outrider.load(build(broken, tmp_path / "bundle", backend=backend, batch=2), slots=None))
    system = numbered(7, 45)
    bad = scheduler.submit([*system, BROKEN, *numbered(9, 40)], SamplingParams(max_new_tokens=5))
    for _ in range(5):
        scheduler.step()
    good = scheduler.submit([*system, 70], SamplingParams(max_new_tokens=5))
    failed = []
    while scheduler.busy:
        failed += [request for request, result in scheduler.step() if isinstance(result, EngineError)]
    assert failed == [bad]
    assert good.finish_reason == "length"
    assert good.stats.copied_tokens == 32  # the chunks that the two have in common


def test_what_is_worth_keeping_makes_way_for_a_request_that_is_moved(four: Outrider) -> None:
    """A request in the middle ends, and the last one is moved to its slot: its text goes to a slot that holds nothing."""
    scheduler = Scheduler(four)
    system = numbered(7, 60)
    first, _, last = (
        scheduler.submit(text, SamplingParams(max_new_tokens=count, min_new_tokens=count))
        for text, count in ((numbered(20, 20), 30), ([*system, 70], 3), (numbered(21, 20), 30))
    )
    scheduler.step()
    while last.slot is not None and last.slot.index == 2:
        scheduler.step()
    assert first.running
    assert last.slot is not None
    assert last.slot.index == 1
    assert ask(scheduler, [*system, 71]) == 60
