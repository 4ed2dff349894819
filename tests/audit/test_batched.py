"""`outrider verify` of a bundle with several slots: batched texts equal the texts of each request alone, or it shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from outrider.audit import audit as audit_module
from outrider.audit.audit import CONTROLLED, MASKED, SAMPLED, Scope, audit
from outrider.audit.prompts import PROMPTS
from outrider.audit.report import Audit
from outrider.commands.verify import command
from outrider.engines.device import Launch
from outrider.engines.session import Pass
from outrider.errors import EngineError
from outrider.runtime.generation import Outrider
from outrider.runtime.rounds.buffers import Lane
from outrider.runtime.rounds.reference import Fault
from outrider.runtime.rounds.rounds import RoundResult, Rounds
from outrider.runtime.rounds.sampling import SamplingState
from outrider.tests.support import build

SLOTS = 3
Run = Callable[..., list[RoundResult | EngineError | None]]


@pytest.fixture(scope="module")
def bundle(trained_exports: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(trained_exports("int4"), tmp_path_factory.mktemp("batched") / "bundle", k=[1, 4], capacity=255, batch=SLOTS)


@pytest.fixture
def batched(bundle: Path) -> Outrider:
    return Outrider.load(bundle, slots=None)


FEW = Scope(PROMPTS[:2], MASKED[1:2], (CONTROLLED, SAMPLED[-1]), length=16, controls=False)


def watch(monkeypatch: pytest.MonkeyPatch, see: Callable[[Lane, SamplingState, RoundResult, int], None]) -> None:
    """Show every result, with the number of sequences in its round, before it is committed."""
    run: Run = Rounds.run

    def watched(self: Rounds, lanes: list[Lane], *rest: Any, **named: Any) -> list[RoundResult | EngineError | None]:
        results = run(self, lanes, *rest, **named)
        for lane, result in zip(lanes, results, strict=True):
            if lane.sampling is not None and isinstance(result, RoundResult):
                see(lane, lane.sampling, result, len(lanes))
        return results

    monkeypatch.setattr(Rounds, "run", watched)


@pytest.mark.slow  # a part of the whole audits
def test_texts_of_requests_that_share_passes_are_those_of_requests_alone(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together: set[tuple[int, bool, int]] = set()
    watch(monkeypatch, lambda lane, sampling, _, count: together.add((count, sampling.greedy, lane.k)))
    reports = list[Audit]()

    def noted(*given: Any, **named: Any) -> Audit:
        reports.append(
            audit(*given, scope=FEW._replace(sampled=(CONTROLLED,), length=32, controls=True), **named | {"draws": 60})
        )
        return reports[0]

    monkeypatch.setattr(audit_module, "audit", noted)
    done = CliRunner().invoke(command, [str(bundle), "--draws", "100"])
    (report,) = reports
    detected = {control.fault: control.detected for control in report.controls[: 1 + len(Fault)]}  # then n-grams and the memory
    # So few draws may not tell this fault, and whether they do decides how it ends; the others emit what truncation excludes.
    found = detected.pop(Fault.RESIDUAL_NOT_SUBTRACTED.value)
    others = {fault.value for fault in Fault} - {Fault.RESIDUAL_NOT_SUBTRACTED.value}
    assert detected == {None: False} | dict.fromkeys(others, True)
    assert [control.detected for control in report.controls[1 + len(Fault) :]] == [False, True] * 2
    parts = ("arithmetic", "greedy", "batched", "sampled", "support", "controls", "counters")
    assert report.verdicts() == dict.fromkeys(parts, True) | {"controls": found}
    assert done.exit_code == (0 if found else 1)
    lines = done.stdout.splitlines()
    for part, passed in report.verdicts().items():
        assert [line[11:15] for line in lines if line.startswith(f"{part} ")] == ["pass" if passed else "FAIL"]
    for fault, is_found in [*detected.items(), (Fault.RESIDUAL_NOT_SUBTRACTED.value, found)]:
        cells = [[cell.strip() for cell in line.split("│")] for line in lines if "│" in line]
        (verdict,) = (row[-2] for row in cells if row[1] == (fault or "none: the reference itself"))
        assert verdict.startswith("detected" if is_found else "not detected")
    assert lines[-1] == ("the bundle passes" if found else "the bundle FAILS")
    assert "batched    pass  30 texts of batched requests" in done.stdout  # 5 requests, plain and in 5 modes
    assert {(SLOTS, greedy, k) for greedy in (True, False) for k in (0, 1, 4)} <= together


def test_a_beginning_that_is_shared_and_not_copied_fails(batched: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with the same prompt and other settings have it copied from one another's slots."""
    session, copied = batched.sessions["target"], []
    monkeypatch.setattr(session, "copy", lambda slot, to, length: copied.append(length))
    report = audit(batched, draws=2, scope=FEW)
    assert copied
    assert report.greedy.passed
    assert report.batched is not None
    assert not report.batched.passed


def test_a_bundle_with_one_slot_has_no_such_part(bundle: Path) -> None:
    report = audit(Outrider.load(bundle), draws=2, scope=FEW)
    assert report.batched is None
    assert "batched" not in report.verdicts()


def test_a_token_that_differs_only_in_batches_fails(batched: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    def swap(_: Lane, sampling: SamplingState, result: RoundResult, count: int) -> None:
        if count > 1 and sampling.emitted > 10 and sampling.grammar is None:  # a grammar notices by itself
            result.tokens[-1] = 77

    watch(monkeypatch, swap)
    report = audit(batched, draws=2, scope=FEW)
    assert report.greedy.passed
    assert report.batched is not None
    assert not report.batched.passed
    assert not report.batched.near_ties
    assert {each.speculative for each in report.batched.differences} == {77}
    assert {each.mode for each in report.batched.differences} >= {"plain", "model, k = 4", "auto, k = auto"}
    assert not report.passed


def test_a_near_tie_that_the_number_of_sequences_explains_is_shown_counted_and_bounded(
    batched: Outrider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target whose arithmetic differs in passes of several sequences, as another kernel's would, at one place."""
    session = batched.sessions["target"]
    bind = session.bind
    place = len(batched.text.encode(PROMPTS[0], chat=False)) + 9

    def other_kernel(buffers: Pass) -> Launch:
        launch = bind(buffers)

        def run() -> None:
            launch()
            count, rows = buffers.input_ids.shape
            for lane, at in enumerate(buffers.positions.view().tolist()):
                if count > 1 and 0 <= place - at < rows <= buffers.logits.shape[1]:
                    values = buffers.logits.view()[lane, place - at]
                    values[values.argmax()] = values.min()

        return run

    monkeypatch.setattr(session, "bind", other_kernel)
    session.unbind()
    scope = FEW._replace(prompts=PROMPTS[:1], sampled=())  # whose texts may have a tie of their own at that place
    texts = audit(batched, draws=2, scope=scope).batched
    assert texts is not None
    assert texts.differences == []
    assert {each.place for each in texts.near_ties} == {10}
    assert len({each.mode for each in texts.near_ties}) == 5  # plain, each k of the model, n-grams, and at random
    assert texts.ties == texts.allowed == 1
    assert texts.passed
    texts.near_ties.append(replace(texts.near_ties[0], place=11))
    assert not texts.passed
