"""A bundle with a trained draft head and a draft model: every command knows both, and the text is the target's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.audit.audit import CONTROLLED, MASKED, Scope, audit
from outrider.audit.prompts import PROMPTS
from outrider.bundle.folder import read_manifest
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.rounds.reference import Fault
from outrider.tests.serve.server import fetch, serving_here
from outrider.tests.support import bench_once, run_here

PROMPT = "Customer: Hi, I would like to book a table for two in San Jose.\nAgent:"
SHORT = Scope(PROMPTS[:1], MASKED[:1], (CONTROLLED,), length=32)
SETTINGS: dict[str, dict[str, Any]] = {
    "exact-match": {"temperature": 0.8, "rule": "exact-match", "seed": 5},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "logprobs": {"logprobs": 3},
    "stop": {"stop": ["San Jose"]},
}


@pytest.fixture(scope="module")
def bundle(drafter_bundles: Callable[..., Path]) -> Path:
    return drafter_bundles("fp32", "trained head", capacity=512, batch=8, k=[1, 4])


@pytest.fixture(scope="module")
def both(bundle: Path) -> Outrider:
    return Outrider.load(bundle)


@pytest.mark.parametrize("drafter", ["head", "model"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_its_text_is_that_of_plain_decoding(both: Outrider, setting: str, drafter: str) -> None:
    params = SamplingParams(max_new_tokens=80, **SETTINGS[setting])
    plain, drafted = (
        [(event.text, event.token_ids) for event in both.generate(PROMPT, params, **mode)]
        for mode in ({"k": 0}, {"k": 4, "drafter": drafter})
    )
    assert "".join(text for text, _ in drafted) == "".join(text for text, _ in plain)
    assert sum((ids for _, ids in drafted), ()) == sum((ids for _, ids in plain), ())


def test_the_head_is_accepted_as_its_card_says(both: Outrider) -> None:
    """About as often as the draft model; a head that is fed wrongly would be close to 1."""
    stats = list(both.generate(PROMPT, SamplingParams(max_new_tokens=150), k=4, drafter="head"))[-1].stats
    assert stats.rounds_by_drafter == {"head": stats.drafting_rounds}
    assert stats.mean_acceptance_length > 1.8


def test_it_is_inspected_and_measured(bundle: Path) -> None:
    shown = run_here("inspect", bundle)
    assert shown.returncode == 0, shown.stderr
    assert "target/head.onnx" in shown.stdout
    build = read_manifest(bundle).build
    assert build is not None
    assert build.acceptance.keys() == {"head", "model"}
    assert min(build.acceptance.values()) > 0.2
    assert {"target", "draft", "head"} <= build.costs.keys()


def test_bench_and_plan_show_them_side_by_side(bundle: Path, tmp_path: Path) -> None:
    results = bench_once(bundle, PROMPT, tmp_path)
    labels = [mode.label for mode in results.modes]
    assert labels[1:5] == [f"draft {kind}, k = {k}" for kind in ("head", "model") for k in (1, 4)]
    assert len(results.drafts) == 2
    assert all(each.same_text == each.prompts for each in results.summaries)
    planned = json.loads(run_here("plan", bundle, "--bench", tmp_path / "report" / "bench.json", "--json").stdout)
    assert planned["measured"]["support"].keys() == {"none", "head", "model"}
    assert {each["drafter"] for each in planned["predictions"] if each["k"]} == {"head", "model"}


def test_the_server_counts_the_rounds_of_each(bundle: Path) -> None:
    with serving_here(bundle, k=4, drafter="head") as server:
        body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0}
        status, _, _ = fetch(f"{server.url}/v1/completions", json.dumps(body).encode())
        assert status == 200
        lines = fetch(f"{server.url}/metrics")[2].decode().splitlines()
        metrics = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}
    assert metrics['outrider_spec_decode_num_drafts_total{drafter="head"}'] > 3
    assert metrics['outrider_spec_decode_num_accepted_tokens_total{drafter="head"}'] > 3


@pytest.mark.slow
def test_it_passes_the_audit(bundle: Path) -> None:
    """In short: one setting and few draws, which show all wrong samplers over the head's proposals but the subtlest one."""
    report = audit(Outrider.load(bundle, slots=None), draws=50, scope=SHORT)
    verdicts = report.verdicts()
    assert {name for name, passed in verdicts.items() if not passed} <= {"controls"}
    detected = {control.fault for control in report.controls if control.detected}
    assert {fault.value for fault in Fault} - detected <= {Fault.RESIDUAL_NOT_SUBTRACTED.value}
    assert None not in detected
    assert report.counters.accepted > 100


@pytest.mark.parametrize("drafter", [pytest.param("block", marks=pytest.mark.slow), "parallel-head"])
def test_heads_that_draft_in_one_pass_pass_the_audit(drafter_bundles: Callable[..., Path], drafter: str) -> None:
    """In short, and with random heads: greedy and sampled, every k and drafter, alone and in a batch."""
    outrider = Outrider.load(drafter_bundles("fp32", f"random {drafter}", capacity=512, batch=2, k=[1, 4]), slots=None)
    assert outrider.drafters[0] == drafter
    report = audit(outrider, draws=10, scope=SHORT._replace(controls=False))
    assert report.batched is not None
    assert report.passed
    assert report.counters.drafted > 100


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["random head", "trained head", "random block", "random parallel-head"])
@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_it_passes_the_whole_audit(drafter_bundles: Callable[..., Path], precision: str, drafter: str) -> None:
    """What a random draft proposes has so little of the target's probability that leaving it in the residual shows in no number
    of draws that could be made here."""
    outrider = Outrider.load(drafter_bundles(precision, drafter, capacity=512, batch=8, k=[1, 4]), slots=None)
    report = audit(outrider)
    undetected = {control.fault for control in report.controls if control.fault is not None and not control.detected}
    subtle = {Fault.RESIDUAL_NOT_SUBTRACTED.value} if drafter.startswith("random") else set()
    assert undetected <= subtle
    assert {name for name, passed in report.verdicts().items() if not passed} <= ({"controls"} if undetected else set())
