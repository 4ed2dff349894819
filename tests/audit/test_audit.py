"""`outrider verify`: a correct bundle passes, a wrong one fails, and a failure names its reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from outrider.audit.audit import CONTROLLED, FALSE_ALARM, MASKED, SAMPLED, Cell, PromptSettings, Scope, audit
from outrider.audit.controls import ReferenceWatch, Watch
from outrider.audit.prompts import PROMPTS
from outrider.audit.report import Audit
from outrider.audit.texts import DraftingMode
from outrider.bundle.manifest import sampler_file
from outrider.engines.device import Launch
from outrider.engines.session import Pass
from outrider.errors import EngineError
from outrider.export.pair import export_pair
from outrider.progress import SILENT
from outrider.runtime.decoder import Decoder
from outrider.runtime.generation import Outrider
from outrider.runtime.policy.policy import FixedPolicy, Policy
from outrider.runtime.request import Request
from outrider.runtime.rounds.buffers import Lane
from outrider.runtime.rounds.reference import Fault
from outrider.runtime.rounds.rounds import RoundResult, Rounds
from outrider.runtime.stats import Stats
from outrider.tests.support import build, reseal, run_here

SLOTS, DRAWN = 8, 110


def several(trained_bundles: Callable[..., Path]) -> Path:
    """A bundle with several k and slots."""
    return trained_bundles("int4", capacity=255, batch=SLOTS, k=[1, 4])


@pytest.fixture(scope="module")
def report(trained_bundles: Callable[..., Path]) -> dict[str, Any]:
    """The report on a bundle, as a release pipeline would read it, with fewer draws than usual."""
    done = run_here("verify", several(trained_bundles), "--draws", str(DRAWN), "--json")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.slow
def test_the_shipped_pair_passes(shipped_export: Path, tmp_path: Path) -> None:
    """By everything that a user's `outrider verify` does."""
    done = run_here("verify", build(shipped_export, tmp_path / "bundle", capacity=512, batch=SLOTS), "--json")
    assert (done.returncode, json.loads(done.stdout)["passed"]) == (0, True), done.stdout


def test_a_bundle_passes(report: dict[str, Any]) -> None:
    assert report["passed"]
    parts = ("arithmetic", "greedy", "batched", "sampled", "support", "controls", "counters")
    assert report["verdicts"] == dict.fromkeys(parts, True)


def test_greedy_is_compared_for_every_k(report: dict[str, Any]) -> None:
    assert report["greedy"]["compared"] == (10 + len(MASKED)) * 5  # two of the draft model, n-grams, memory, and all at random
    assert report["greedy"]["differences"] == []


def test_every_setting_is_drawn_for_every_k_and_compared_at_every_place(report: dict[str, Any]) -> None:
    assert [cell["k"] for cell in report["sampled"]] == [*[1, 4, "auto", None] * (len(SAMPLED) + 1), "ngram", "memory"]
    for cell in report["sampled"]:
        assert [each["place"] for each in cell["comparisons"]] == ["first", "second", "third", "last"]
        assert all(each["draws"] == [2 * DRAWN, DRAWN if cell["k"] else 3 * DRAWN] for each in cell["comparisons"])
        assert cell["excluded"] == 0
        assert cell["k"] or cell["emitted"] > 20 * DRAWN


def test_every_wrong_sampler_is_detected_and_the_right_one_passes(report: dict[str, Any]) -> None:
    named = [(control["sampled"]["k"], control["fault"]) for control in report["controls"]]
    of_model = [(4, fault) for fault in (None, *(fault.value for fault in Fault))]
    on_host = [(name, fault) for name in ("ngram", "memory") for fault in (None, Fault.ALWAYS_ACCEPT.value)]
    assert named == [*of_model, *on_host]
    for control in report["controls"]:  # by the distribution, not by the support alone
        if control["fault"] == Fault.TARGET_NOT_TRUNCATED.value:  # the test below requires this of it
            assert control["sampled"]["excluded"] > 0
            continue
        least = min(each["p_value"] for each in control["sampled"]["comparisons"])
        assert least < 1e-5 if control["fault"] else least > 1e-3


def test_a_target_that_is_not_truncated_is_detected_by_the_distribution_too(trained_bundles: Callable[..., Path]) -> None:
    """At a temperature at which truncation cuts more of this pair's tokens than at that of the controls."""
    outrider = Outrider.load(several(trained_bundles), slots=None)
    params, prompt = SAMPLED[3]
    cell = Cell(outrider, params, outrider.text.encode(prompt, chat=False), 0, FALSE_ALARM, SILENT)
    plain = cell.draw(Watch(), DraftingMode(0, None), 200)
    for fault in (None, Fault.TARGET_NOT_TRUNCATED):
        least = min(
            each.p_value for each in cell.compare(plain, cell.draw(ReferenceWatch(fault), DraftingMode(4, "model"), 100))
        )
        assert least < 1e-5 if fault else least > 1e-3


def test_counters_are_counted_and_balance(report: dict[str, Any]) -> None:
    counters = report["counters"]
    assert counters["unbalanced"] == 0
    assert min(counters[name] for name in ("drafted", "accepted", "rejected", "unexamined", "own")) > 100


def test_decisions_are_checked_against_the_reference(report: dict[str, Any]) -> None:
    assert report["arithmetic"]["checked"] > 10_000
    assert report["arithmetic"]["disagreed"] <= 3


def damaged(bundle: Path, folder: Path, sampler: str, damage: Callable[[onnx.GraphProto], None]) -> Path:
    """A copy of a bundle with one of its own graphs changed, sealed again."""
    copy = Path(shutil.copytree(bundle, folder / "bundle"))
    model = onnx.load(copy / sampler_file(sampler))
    damage(model.graph)
    onnx.save(model, copy / sampler_file(sampler))
    reseal(copy)
    return copy


def accept_more(factor: float) -> Callable[[onnx.GraphProto], None]:
    """Multiply every uniform of the accept decisions."""

    def damage(graph: onnx.GraphProto) -> None:
        (split,) = (node for node in graph.node if node.op_type == "Split" and node.input[0] == "uniforms")
        honest = split.output[0]
        split.output[0] = f"{honest}_as_given"
        graph.initializer.append(onnx.numpy_helper.from_array(np.array(factor, dtype=np.float32), "factor"))
        at = list(graph.node).index(split) + 1
        graph.node.insert(at, onnx.helper.make_node("Mul", [f"{honest}_as_given", "factor"], [honest]))

    return damage


def swap(kind: str, other: str, inputs: list[str] | None = None) -> Callable[[onnx.GraphProto], None]:
    """Turn the only node of one kind into another."""

    def damage(graph: onnx.GraphProto) -> None:
        (node,) = (node for node in graph.node if node.op_type == kind)
        node.op_type = other
        if inputs is not None:
            node.input[:] = inputs
            del node.attribute[:]

    return damage


@pytest.fixture(scope="module")
def one_k(trained_bundles: Callable[..., Path]) -> Path:
    """A bundle for one number of draft tokens, which takes less time."""
    return trained_bundles(capacity=512, k=[4])


@pytest.fixture(scope="module")
def one(one_k: Path) -> Outrider:
    return Outrider.load(one_k)


FEW = Scope(PROMPTS[:1], MASKED, (CONTROLLED, SAMPLED[-1]), length=24, controls=False)  # truncation and penalties


def audited(outrider: Outrider, draws: int, scope: Scope = FEW) -> Audit:
    return audit(outrider, draws=draws, scope=scope)


def test_a_bundle_whose_sampler_accepts_everything_fails(one_k: Path, tmp_path: Path) -> None:
    seen = FEW._replace(masked=(), sampled=SAMPLED[:1])  # where the draft is most often wrong
    report = audited(Outrider.load(damaged(one_k, tmp_path, "verifier", accept_more(0))), 100, seen)
    failed = {name for name, passed in report.verdicts().items() if not passed}
    assert {"sampled", "arithmetic"} <= failed
    assert "greedy" not in failed  # which alone would not have shown it
    assert not report.passed


@pytest.mark.parametrize(
    ("sampler", "damage", "draws", "sampled"),
    [
        # Seldom wrong: so few draws do not show it.
        pytest.param("verifier", accept_more(0.8), 100, (CONTROLLED,), marks=pytest.mark.slow),
        ("verifier", swap("ArgMax", "ArgMin"), 10, FEW.sampled),  # wrong in plain decoding, too
        pytest.param("greedy_verifier", swap("ArgMax", "ArgMin"), 25, FEW.sampled, marks=pytest.mark.slow),
        pytest.param("greedy_draft_sampler", swap("ArgMax", "ArgMin"), 25, FEW.sampled, marks=pytest.mark.slow),
        # No bans, no penalties.
        pytest.param("verifier", swap("ScatterElements", "Identity", ["logits"]), 10, FEW.sampled, marks=pytest.mark.slow),
        pytest.param("draft_sampler", swap("ScatterElements", "Identity", ["logits"]), 25, FEW.sampled, marks=pytest.mark.slow),
        ("logprobs", swap("LogSoftmax", "Identity", ["logits"]), 10, FEW.sampled),
    ],
)
def test_a_wrong_graph_fails_even_if_plain_decoding_is_equally_wrong(
    one_k: Path, tmp_path: Path, sampler: str, damage: Callable[[onnx.GraphProto], None], draws: int, sampled: PromptSettings
) -> None:
    outrider = Outrider.load(damaged(one_k, tmp_path, sampler, damage))
    report = audited(outrider, draws, FEW._replace(sampled=sampled, length=96))
    assert not report.arithmetic.passed
    assert report.arithmetic.disagreed > 10


def test_a_bundle_too_small_for_the_audits_texts_names_the_capacity_needed(tiny_export: Path, tmp_path: Path) -> None:
    outrider = Outrider.load(build(tiny_export, tmp_path / "bundle", k=[1, 4], capacity=34))
    with pytest.raises(EngineError, match=r"need a capacity of \d+; the bundle has 34"):
        audit(outrider)


def test_a_greedy_difference_without_a_near_tie_fails(one: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Rounds.run

    def wrong(self: Rounds, lanes: list[Lane], *rest: Any, **named: Any) -> list[RoundResult | EngineError | None]:
        results = run(self, lanes, *rest, **named)
        for lane, result in zip(lanes, results, strict=True):
            assert lane.sampling is not None
            assert isinstance(result, RoundResult)
            free = lane.sampling.grammar is None  # a grammar notices by itself
            if free and lane.k and lane.sampling.params.temperature == 0 and lane.sampling.emitted > 5:
                result.tokens[-1] = 77
        return results

    monkeypatch.setattr(Rounds, "run", wrong)
    report = audited(one, draws=2)
    assert not report.greedy.passed
    assert not report.greedy.near_ties
    assert report.greedy.differences[0].speculative == 77
    assert not report.passed


@pytest.mark.parametrize("width", [1, 3, 5])
def test_a_near_tie_that_the_number_of_rows_explains_passes_counted_and_bounded(
    one_k: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """A target whose arithmetic differs in the first rows of passes of 5, as another kernel's would, at one place."""
    one = Outrider.load(one_k)
    session = one.sessions["target"]
    bind = session.bind
    prompt = one.text.encode(PROMPTS[0], chat=False)
    place = len(prompt) + 7  # where a round begins
    decode = Decoder.round
    fixed = False  # one tie is enough, so there is none at random choices

    def noted(self: Decoder, requests: list[Request], policy: Policy, *rest: Any) -> list[RoundResult | EngineError]:
        nonlocal fixed
        fixed = isinstance(policy, FixedPolicy)
        return decode(self, requests, policy, *rest)

    def other_kernel(buffers: Pass) -> Launch:
        launch = bind(buffers)

        def run() -> None:
            launch()
            row = place - int(buffers.positions.view()[0])
            if fixed and buffers.input_ids.shape[1] == 5 and 0 <= row < width:
                values = buffers.logits.view()[0, row]
                values[values.argmax()] = values.min()

        return run

    monkeypatch.setattr(Decoder, "round", noted)
    monkeypatch.setattr(session, "bind", other_kernel)
    session.unbind()
    greedy = audited(one, draws=2).greedy
    assert greedy.differences == []
    assert {tie.place for tie in greedy.near_ties} == {8}
    assert greedy.allowed == 1
    assert greedy.passed


def test_a_counter_that_does_not_balance_fails(one: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    count = Stats.count

    def forgetful(self: Stats, drafter: str, drafted: int, accepted: int, rejected: int, own: int) -> None:
        count(self, drafter, drafted, accepted, 0, own)

    monkeypatch.setattr(Stats, "count", forgetful)
    report = audited(one, draws=2)
    assert not report.counters.passed
    assert report.greedy.passed


def test_the_audit_is_the_same_each_time_and_leaves_the_bundle_as_it_was(one: Outrider) -> None:
    rounds, policy = one.rounds, one.policy
    first = audited(one, draws=5).as_dict()
    assert (one.rounds, one.policy) == (rounds, policy)
    assert one.rounds.observer is None
    assert audited(one, draws=5).as_dict() == first


@pytest.mark.slow  # tests/audit/test_report.py has what a control that is not detected means
def test_a_draft_that_is_the_target_leaves_the_audit_without_power(checkpoints: Path, tmp_path: Path) -> None:
    """Always accepting is right there, so the control is not detected, and the audit does not pass without that proof."""
    target = str(checkpoints / "target")
    export_pair(target, target, tmp_path / "onnx", precision="fp32")
    report = audited(
        Outrider.load(build(tmp_path / "onnx", tmp_path / "bundle", k=[4], batch=SLOTS), slots=None),
        60,
        FEW._replace(masked=(), sampled=(CONTROLLED,), controls=True),
    )
    assert not report.passed
    assert {name for name, passed in report.verdicts().items() if not passed} == {"controls"}
    detected = {control.fault: control.detected for control in report.controls if control.sampled.k == 4}
    assert not detected[Fault.ALWAYS_ACCEPT.value]
    assert detected[Fault.TARGET_NOT_TRUNCATED.value]  # as many draws show what is wrong
