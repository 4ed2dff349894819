"""The promise for a target with recurrent layers that drafts with its own MTP head: the trained one in examples/tiny-hybrid.

`make test` runs its first and its last layer alone, one of each kind, because a trace of all takes twice the time. Their text
repeats itself, so the head is right often, though not always.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.audit.audit import CONTROLLED, MASKED, Scope, audit
from outrider.audit.prompts import PROMPTS as TEXTS
from outrider.bundle.folder import read_manifest
from outrider.engines.contract import cache_tensors
from outrider.runtime.generation import Event, Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.scheduler import Scheduler
from outrider.tests.deferred import deferred
from outrider.tests.runtime.hybrid.hybrids import CAPACITY, SHORT, WHOLE, K, alone, endless
from outrider.tests.runtime.test_golden import FEW, PROMPTS, run, tokens
from outrider.tests.support import HYBRID, Made, run_here
from outrider.training.arguments import TrainingArguments
from outrider.training.eagle3 import Eagle3Objective
from outrider.training.train import check_target

MODES = (*K, "auto", "n-grams", "at random")
PRECISIONS = (SHORT, "fp32", "int8", "int4")


@pytest.fixture(scope="module")
def plain(loaded: Made[Outrider]) -> Made[dict[str, list[Event]]]:
    return Made(lambda precision: Made(lambda name: run(loaded[precision], PROMPTS[name], k=0)))


def in_turn(case: dict[str, Any]) -> bool:
    """With two layers, each mode with one prompt, in turn, and every prompt at random."""
    in_turn = FEW.index(case["prompt"]) == MODES.index(case["k"]) % len(FEW)
    return case["precision"] == SHORT and (case["k"] == "at random" or in_turn)


@pytest.mark.in_turn(runs=in_turn)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("prompt", FEW)
@pytest.mark.parametrize("k", MODES)
def test_speculative_text_is_plain_text_up_to_the_last_slot(
    loaded: Made[Outrider], plain: Made[dict[str, list[Event]]], precision: str, prompt: str, k: int | str
) -> None:
    events, want = run(loaded[precision], PROMPTS[prompt], k), plain[precision][prompt]
    assert tokens(events) == tokens(want)
    assert events[-1].finish_reason == "capacity"
    stats = events[-1].stats
    assert stats.prompt_tokens + stats.emitted == CAPACITY + 1


@pytest.mark.parametrize("precision", [SHORT, WHOLE])
@pytest.mark.parametrize("prompt", FEW)
def test_plain_text_is_that_of_transformers(
    targets: Made[Path], plain: Made[dict[str, list[Event]]], precision: str, prompt: str
) -> None:
    """Each token is the most likely one after those before it, which defines greedy text for any implementation."""
    model = AutoModelForCausalLM.from_pretrained(targets[precision], dtype="float32")
    ids = AutoTokenizer.from_pretrained(targets[precision])(PROMPTS[prompt]).input_ids
    ours = tokens(plain[precision][prompt])
    assert len(ids) + len(ours) == CAPACITY + 1
    with torch.no_grad():
        logits = model(torch.tensor([ids + ours])).logits[0, len(ids) - 1 : -1]
    assert logits.argmax(-1).tolist() == ours


@pytest.mark.parametrize("precision", [SHORT, WHOLE])
def test_the_trained_head_drafts_several_tokens_ahead(loaded: Made[Outrider], precision: str) -> None:
    accepted = [run(loaded[precision], PROMPTS[prompt], 4, limit=100)[-1].stats for prompt in FEW]
    assert sum(each.accepted for each in accepted) / sum(each.drafting_rounds for each in accepted) > 0.4
    assert sum(each.accepted_at[1] for each in accepted) > 0  # from the head's own output


def test_on_a_device_that_runs_ahead(bundles: Made[Path], loaded: Made[Outrider]) -> None:
    """As a GPU does. The target's pass changes the states, so no round launches it twice, even where a sampler is undecided."""
    sampled = SamplingParams(temperature=1.0, seed=7, max_new_tokens=40)
    ways = [SamplingParams(max_new_tokens=40), sampled, replace(sampled, top_p=0.99), sampled]
    prompts = [loaded[SHORT].text.encode(PROMPTS[name], chat=False) for name in FEW]
    want = [alone(loaded[SHORT], *asked) for asked in zip(prompts, ways, strict=True)]
    for max_candidates in (None, 256):
        queued = deferred(bundles[SHORT], max_candidates)
        got = [tokens(list(queued.generate(prompt, params, k=4))) for prompt, params in zip(prompts, ways, strict=True)]
        assert got == want


def test_the_end_of_a_text_is_continued(bundles: Made[Path], loaded: Made[Outrider]) -> None:
    """As a chat is: each turn's prompt is the text so far."""
    chatting, single = Outrider.load(bundles[SHORT]), loaded[SHORT]
    scheduler = Scheduler(chatting, max_waiting=1)
    text, kept = single.text.encode(PROMPTS["support"], chat=False), 0
    for _ in range(3):
        request = scheduler.submit(text, SamplingParams(max_new_tokens=15))
        got: list[int] = []
        while scheduler.busy:
            for _, event in scheduler.step():
                got += getattr(event, "token_ids", [])
        assert got == alone(single, text, SamplingParams(max_new_tokens=15))
        assert request.stats.cached_tokens == kept
        kept = len(text) + len(got) - 1
        text = text + got + single.text.encode(" And", chat=False)


def test_inspect_says_what_the_states_and_their_snapshots_take(bundles: Made[Path], loaded: Made[Outrider]) -> None:
    session, model = loaded[SHORT].sessions["target"], read_manifest(bundles[SHORT]).models["target"]
    states = [each.past for each in cache_tensors(model.layers, model.features, model.recurrent) if not each.positional]
    taken = sum(session.cache()[name].nbytes for name in states) * (session.batch + session.places) // session.batch**2
    assert taken > 0
    rows = [line.split("│") for line in run_here("inspect", bundles[SHORT]).stdout.splitlines()]
    said = " ".join(row[2].strip() for row in rows if len(row) > 3)  # the column of the target
    assert f" bytes, {taken:,} of them recurrent states and 2 snapshots" in said


def test_a_draft_for_it_may_be_trained_on_its_answers(targets: Made[Path], bundles: Made[Path], tmp_path: Path) -> None:
    """A bundle of it is recognized as the target's, though few of its layers have attention."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"prompt": f"Question {number}"}) + "\n" for number in range(40)))
    short, whole = (
        TrainingArguments.check(str(target), "eagle3", [texts], tmp_path / f"{target.name}-head")
        for target in (targets[SHORT], HYBRID)
    )
    check_target(short, bundles[SHORT], read_manifest(bundles[SHORT]))
    Eagle3Objective.check(whole.target, None)  # such a head reads more layers than two


@pytest.mark.slow
def test_the_audit_passes(exports: Made[Path], tmp_path: Path) -> None:
    """In short, and with one k; a random head's is in tests/test_two_drafters.py."""
    outrider = Outrider.load(endless(exports[SHORT], tmp_path / "bundle", [4]), slots=None)
    report = audit(outrider, draws=40, scope=Scope(TEXTS[:1], MASKED[:1], (CONTROLLED,), 32))
    failed = {name for name, passed in report.verdicts().items() if not passed}
    assert failed <= {"controls"}
    detected = {control.fault: control.detected for control in report.controls}
    assert not detected.pop(None)
    assert sum(detected.values()) > 2
    assert report.counters.accepted > 100


@pytest.mark.slow
def test_the_whole_audit_passes(bundles: Made[Path]) -> None:
    done = run_here("verify", bundles["fp32"], "--draws", "500", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["passed"]
    assert all(report["verdicts"].values()), report["verdicts"]


@pytest.mark.slow
def test_rounded_weights_pass_the_audit_without_its_wrong_samplers(bundles: Made[Path]) -> None:
    """The host computes the wrong samplers, whatever the precision."""
    report = audit(Outrider.load(bundles["int4"], slots=None), draws=110, scope=Scope(controls=False))
    assert report.passed, report.verdicts()
