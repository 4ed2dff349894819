"""`outrider verify`: a right bundle passes, a wrong one does not, and nothing fails but for a reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from outrider.audit import audit as audit_module
from outrider.audit.audit import CONTROLLED, SAMPLED, audit
from outrider.audit.prompts import PROMPTS
from outrider.audit.reference import Fault
from outrider.audit.report import Audit
from outrider.engines.manifest import sampler_file
from outrider.engines.session import Floats, Int64s
from outrider.export.pair import export_pair
from outrider.runtime.generation import Outrider
from outrider.runtime.sampler import Request, TokenSampler
from outrider.runtime.stats import Stats
from outrider.tests.support import build, reseal, run


@pytest.fixture(scope="module")
def report(shipped_bundle: Path) -> dict[str, Any]:
    """The shipped pair's, as a release pipeline would have it."""
    done = run("verify", shipped_bundle, "--json")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_the_shipped_pair_passes(report: dict[str, Any]) -> None:
    assert report["passed"]
    assert report["verdicts"] == dict.fromkeys(("greedy", "sampled", "support", "controls", "counters"), True)


def test_greedy_is_compared_for_every_k(report: dict[str, Any]) -> None:
    assert report["greedy"]["compared"] == 10 * 4
    assert report["greedy"]["differences"] == []


def test_every_setting_is_drawn_for_every_k_and_compared_at_every_place(report: dict[str, Any]) -> None:
    assert [cell["k"] for cell in report["sampled"]] == [1, 2, 4, 8, None] * len(SAMPLED)
    for cell in report["sampled"]:
        assert [each["place"] for each in cell["comparisons"]] == ["first", "second", "third", "last"]
        assert all(each["draws"] == [1000, 500 if cell["k"] else 2000] for each in cell["comparisons"])
        assert cell["excluded"] == 0
        assert cell["k"] or cell["emitted"] > 10_000


def test_every_wrong_sampler_is_found_and_the_right_one_is_not(report: dict[str, Any]) -> None:
    right, *wrong = report["controls"]
    assert right["fault"] is None
    assert min(each["p_value"] for each in right["sampled"]["comparisons"]) > 1e-6
    assert [control["fault"] for control in wrong] == [fault.value for fault in Fault]
    for control in wrong:  # by the distribution, not by the support alone
        assert min(each["p_value"] for each in control["sampled"]["comparisons"]) < 1e-7


def test_counters_are_counted_and_balance(report: dict[str, Any]) -> None:
    counters = report["counters"]
    assert counters["drafted"] == counters["accepted"] + counters["rejected"] + counters["unexamined"]
    assert counters["emitted"] == counters["accepted"] + counters["own"]
    assert min(counters[name] for name in ("drafted", "accepted", "rejected", "unexamined", "own")) > 100


def test_a_bundle_whose_sampler_accepts_everything_fails(shipped_bundle: Path, tmp_path: Path) -> None:
    """Not a mock: the bundle's own graph, changed so that every accepting uniform is 0, sealed and audited."""
    bundle = Path(shutil.copytree(shipped_bundle, tmp_path / "bundle"))
    path = bundle / sampler_file("verifier")
    model = onnx.load(path)
    (split,) = (node for node in model.graph.node if node.op_type == "Split" and node.input[0] == "uniforms")
    honest = split.output[0]
    split.output[0] = f"{honest}_as_given"
    zero = onnx.numpy_helper.from_array(np.zeros((), dtype=np.float32), "nothing")
    model.graph.initializer.append(zero)
    at = list(model.graph.node).index(split) + 1
    model.graph.node.insert(at, onnx.helper.make_node("Mul", [f"{honest}_as_given", "nothing"], [honest]))
    onnx.save(model, path)
    reseal(bundle)
    done = run("verify", bundle, "--draws", "200")
    assert done.returncode == 1, done.stdout
    assert "sampled   FAIL" in done.stdout
    assert "greedy    pass" in done.stdout  # greedy alone would not have shown it
    assert done.stdout.endswith("the bundle FAILS\n")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy texts and controls alone, and few of them: for what the tests below look at."""
    monkeypatch.setattr(audit_module, "SAMPLED", (CONTROLLED,))
    monkeypatch.setattr(audit_module, "PROMPTS", PROMPTS[:2])


def audited(outrider: Outrider) -> Audit:
    return audit(outrider, draws=100)


@pytest.mark.usefixtures("few")
def test_a_greedy_difference_without_a_near_tie_fails(shipped: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    verify = TokenSampler.verify

    def wrong(self: TokenSampler, request: Request, logits: Floats, drafted_count: int) -> list[int]:
        tokens = verify(self, request, logits, drafted_count)
        return [*tokens[:-1], 77] if drafted_count and request.params.temperature == 0 and request.emitted > 20 else tokens

    monkeypatch.setattr(TokenSampler, "verify", wrong)
    found = audited(shipped)
    assert not found.greedy.passed
    assert not found.greedy.near_ties
    assert found.greedy.differences[0].speculative == 77
    assert not found.passed


@pytest.mark.usefixtures("few")
def test_a_near_tie_that_the_number_of_rows_explains_passes_counted_and_bounded(
    shipped: Outrider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target whose arithmetic differs in passes of 5 rows, as another kernel's would, at one place of one text."""
    session = shipped.sessions["target"]
    run_engine = session._run
    prompt = shipped.text.encode(PROMPTS[0], chat=False)
    place = len(prompt) + 9

    def other_kernel(input_ids: Int64s, positions: Int64s, window: int) -> Floats:
        logits = run_engine(input_ids, positions, window)
        row = place - int(positions[0])
        if input_ids.shape[1] == 5 and 0 <= row < 5:
            best = logits[0, row].argmax()
            logits[0, row, best] = logits[0, row].min()
        return logits

    monkeypatch.setattr(session, "_run", other_kernel)
    greedy = audited(shipped).greedy
    assert len(greedy.near_ties) >= 1
    assert {tie.k for tie in greedy.near_ties} == {4}
    assert greedy.allowed == 1
    assert greedy.passed == (len(greedy.near_ties) <= 1 and not greedy.differences)


@pytest.mark.usefixtures("few")
def test_a_counter_that_does_not_balance_fails(shipped: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    count = Stats.count

    def forgetful(self: Stats, drafted: int, accepted: int, rejected: int, own: int) -> None:
        count(self, drafted, accepted, 0, own)

    monkeypatch.setattr(Stats, "count", forgetful)
    found = audited(shipped)
    assert not found.counters.passed
    assert found.greedy.passed


@pytest.mark.usefixtures("few")
def test_the_audit_is_the_same_each_time_and_leaves_the_bundle_as_it_was(shipped: Outrider) -> None:
    first = audited(shipped).as_dict()
    assert type(shipped.loop.sampler) is TokenSampler
    assert audited(shipped).as_dict() == first


@pytest.mark.usefixtures("few")
def test_a_draft_that_is_the_target_leaves_the_audit_without_power(checkpoints: Path, tmp_path: Path) -> None:
    """Always accepting is right there, so that control is not found: the audit does not pass for want of proof."""
    target = str(checkpoints / "target")
    export_pair(target, target, tmp_path / "onnx", precision="fp32")
    found = audited(Outrider.load(build(tmp_path / "onnx", tmp_path / "bundle")))
    assert not found.passed
    assert {name for name, passed in found.verdicts().items() if not passed} == {"controls"}
    assert not next(control for control in found.controls if control.fault == Fault.ALWAYS_ACCEPT.value).found
