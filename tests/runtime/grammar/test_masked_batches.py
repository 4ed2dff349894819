"""Masks in batches: requests with and without grammars share rounds, and masks that are late change nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from outrider.errors import OutriderError
from outrider.runtime.generation import Event, Outrider
from outrider.runtime.grammar.matcher import LocalMatcher
from outrider.runtime.params import SamplingParams
from outrider.runtime.request import Request
from outrider.runtime.scheduler import MAX_LATE, Scheduler
from outrider.tests.runtime.grammar.grammars import GRAMMARS, PROMPT, K, tokens


@pytest.mark.parametrize("k", [4, "auto", "ngram"])
def test_forced_tokens_are_drafted_for_free_in_batches(trained_bundles: Callable[..., Path], k: int | str) -> None:
    """In rounds of their own, and beside proposals for other requests."""
    bundle = trained_bundles("fp32", capacity=256, max_prompt_chunk=16, k=list(K), batch=4)
    batched = Outrider.load(bundle, slots=4)
    named = {"k": K[-1], "drafter": "ngram"} if k == "ngram" else {"k": k}
    for others in (["forces"] * 3, ["none"] * 3) if k == "ngram" else (["forces"] * 3,):
        scheduler = Scheduler(batched, **named)
        prompt = batched.text.encode(PROMPT + " a coffee, a coffee, a coffee,", chat=False)
        params = [SamplingParams(max_new_tokens=40, structured_outputs=GRAMMARS.get(name)) for name in ("forces", *others)]
        first, *_ = scheduler.submit_all([(prompt, each) for each in params])
        while scheduler.busy:
            for _, event in scheduler.step():
                assert not isinstance(event, OutriderError)
        forced = first.stats.rounds_by_drafter["grammar"]
        assert forced >= first.stats.rounds - 1  # of the last one, the end is all that is left


def test_requests_with_and_without_grammars_share_rounds(trained_bundles: Callable[..., Path]) -> None:
    bundle = trained_bundles("fp32", capacity=256, max_prompt_chunk=16, k=list(K), batch=4)
    alone, batched = Outrider.load(bundle), Outrider.load(bundle, slots=4)
    chosen = [
        SamplingParams(max_new_tokens=60, structured_outputs=GRAMMARS.get(name), temperature=heat, seed=5, rule="exact-match")
        for name in (*GRAMMARS, "none")
        for heat in (0.0, 0.8)
    ]
    want = [tokens(list(alone.generate(PROMPT, params, k=0))) for params in chosen]
    for k in (0, 4, "auto"):
        scheduler = Scheduler(batched, k=k)
        requests = scheduler.submit_all([(batched.text.encode(PROMPT, chat=False), params) for params in chosen])
        answers: dict[Request, list[int]] = {request: [] for request in requests}
        while scheduler.busy:
            for request, event in scheduler.step():
                assert not isinstance(event, OutriderError)
                answers[request] += event.token_ids
        assert [answers[request] for request in requests] == want


class LateMatcher(LocalMatcher):
    """A matcher whose masks are late every third time that they are asked for, and behind drafted tokens every second time."""

    asked = 0

    def ready(self, patient: bool = True) -> bool:
        """See `Matcher.ready`."""
        type(self).asked += 1
        return self.asked % 3 > 0

    def masks(self, drafted: Sequence[int]) -> tuple[list[npt.NDArray[np.bool_]], int]:
        """See `Matcher.masks`."""
        type(self).asked += 1
        masks, rows = super().masks(drafted)
        if self.asked % 2:
            rows = 1
        return masks[:rows], rows


@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_masks_that_are_late_change_nothing(
    trained_bundles: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    """Their answers sit out rounds, and others go on."""
    outrider = Outrider.load(trained_bundles("fp32", capacity=256, max_prompt_chunk=16, k=list(K), batch=4), slots=4)
    prompt = outrider.text.encode(PROMPT, chat=False)
    grammars = [GRAMMARS["schema"], GRAMMARS["branches"], None]
    params = [SamplingParams(max_new_tokens=40, structured_outputs=each, seed=7, temperature=1.0) for each in grammars]
    want = [tokens(list(outrider.generate(prompt, each, k=0))) for each in params]
    monkeypatch.setattr("outrider.runtime.grammar.compiler.LocalMatcher", LateMatcher)
    monkeypatch.setattr(LateMatcher, "asked", 0)
    scheduler = Scheduler(outrider, k=4, drafter=drafter)
    requests = scheduler.submit_all([(prompt, each) for each in params])
    answers: dict[Request, list[int]] = {request: [] for request in requests}
    while scheduler.busy:
        for request, event in scheduler.step():
            assert isinstance(event, Event)
            answers[request] += event.token_ids
    assert [*answers.values()] == want
    assert LateMatcher.asked > 0


class StuckMatcher(LocalMatcher):
    """A matcher that is not ready while the class is stuck."""

    stuck = False

    def ready(self, patient: bool = True) -> bool:
        """See `Matcher.ready`."""
        return not self.stuck


@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_an_answer_whose_masks_do_not_come_gives_its_slot_to_another_request(
    trained_bundles: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    """It continues later from the tokens that it has, in any slot, and gets the same text."""
    outrider = Outrider.load(trained_bundles("fp32", capacity=256, max_prompt_chunk=16, k=list(K), batch=4), slots=2)
    prompt = outrider.text.encode(PROMPT, chat=False)
    structured = [GRAMMARS["schema"], GRAMMARS["branches"], None, None]
    params = [SamplingParams(max_new_tokens=40, structured_outputs=each, seed=7, temperature=1.0) for each in structured]
    want = [tokens(list(outrider.generate(prompt, each, k=0))) for each in params]
    monkeypatch.setattr("outrider.runtime.grammar.compiler.LocalMatcher", StuckMatcher)
    now = [0.0]
    scheduler = Scheduler(outrider, k=4, drafter=drafter, clock=lambda: now[0])
    late = scheduler.submit_all([(prompt, each) for each in params[:2]], "late")
    answers: dict[Request, list[int]] = {request: [] for request in late}

    def step() -> None:
        for request, event in scheduler.step():
            assert isinstance(event, Event)
            answers[request] += event.token_ids

    while not all(answers.values()):
        step()
    cached = [request.stats.cached_tokens for request in late]
    monkeypatch.setattr(StuckMatcher, "stuck", True)
    others = scheduler.submit_all([(prompt, each) for each in params[2:]], "other")
    answers |= {request: [] for request in others}
    for _ in range(3):
        step()
    assert [request.running for request in others] == [False, False]
    now[0] += MAX_LATE
    step()
    assert [request.running for request in (*late, *others)].count(True) == 2
    assert any(request.running for request in others)
    while any(request.finish_reason is None for request in others):
        step()
    assert all(request.finish_reason is None for request in late)
    monkeypatch.setattr(StuckMatcher, "stuck", False)
    while scheduler.busy:
        step()
    assert [*answers.values()] == want
    assert [request.stats.cached_tokens for request in late] == cached
    assert [request.stats.emitted for request in late] == [len(answers[request]) for request in late]
