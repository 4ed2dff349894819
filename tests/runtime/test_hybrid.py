"""The promise for a target with recurrent layers that drafts with its own MTP head: the trained one in examples/tiny-hybrid.

`make test` runs its first and its last layer alone, one of each kind, because a trace of all takes twice the time. Their text
repeats itself, so the head is right often, though not always.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.audit.audit import CONTROLLED, MASKED, Scope, audit
from outrider.audit.controls import RandomPolicy
from outrider.audit.prompts import PROMPTS as TEXTS
from outrider.bundle.folder import read_manifest
from outrider.engines.contract import cache_tensors
from outrider.errors import EngineError, OutriderError
from outrider.export.pair import export_pair
from outrider.runtime.generation import Event, Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.rounds.buffers import Lane
from outrider.runtime.rounds.rounds import Rounds
from outrider.runtime.scheduler import Scheduler
from outrider.tests.deferred import deferred
from outrider.tests.runtime.test_golden import FEW, PROMPTS, run, tokens
from outrider.tests.support import ROOT, Made, build, reseal, run_here
from outrider.training.arguments import TrainingArguments
from outrider.training.eagle3 import Eagle3Objective
from outrider.training.train import check_target

HYBRID = ROOT / "examples" / "tiny-hybrid" / "target"
K, CHUNK = (1, 2, 4, 8), 16
MODES = (*K, "auto", "n-grams", "at random")
SHORT = "two layers"  # in fp32
PRECISIONS = (SHORT, "fp32", "int8", "int4")
CAPACITY, SLOTS = 191, 3  # with the spare position, so that a slot's cache begins at an aligned address
SAMPLED = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.8, top_p=0.9, seed=6, repetition_penalty=1.2),
]


def endless(export: Path, folder: Path, k: Sequence[int]) -> Path:
    """A bundle in which no token ends the text."""
    build(export, folder, k=[*k], capacity=CAPACITY, batch=SLOTS, max_prompt_chunk=CHUNK)
    reseal(folder, generation=msgspec.structs.replace(read_manifest(folder).generation, eos_token_ids=[]))
    return folder


def shorten(folder: Path) -> None:
    """Copy the target with its first and its last layer alone."""
    shutil.copytree(HYBRID, folder)
    config, tensors = json.loads((HYBRID / "config.json").read_text()), load_file(HYBRID / "model.safetensors")
    last = config["num_hidden_layers"] - 1
    kept = {f"model.layers.{layer}.": f"model.layers.{at}." for at, layer in enumerate((0, last))}
    changes = {"num_hidden_layers": len(kept), "layer_types": [config["layer_types"][layer] for layer in (0, last)]}
    (folder / "config.json").write_text(json.dumps(config | changes))
    shortened = {name: each for name, each in tensors.items() if not name.startswith("model.layers.")}
    for old, new in kept.items():
        shortened |= {name.replace(old, new): each for name, each in tensors.items() if name.startswith(old)}
    save_file(shortened, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def targets(once: Callable[[str, Callable[[Path], object]], Path]) -> Made[Path]:
    """The checkpoints by precision."""
    return Made(lambda precision: once("hybrid-short", shorten) if precision == SHORT else HYBRID)


@pytest.fixture(scope="module")
def exports(targets: Made[Path], once: Callable[[str, Callable[[Path], object]], Path]) -> Made[Path]:
    """The target and its head by precision."""

    def make(precision: str) -> Path:
        source, kind = str(targets[precision]), "fp32" if precision == SHORT else precision
        return once(f"hybrid-{precision}", lambda folder: export_pair(source, None, folder, precision=kind))

    return Made(make)


@pytest.fixture(scope="module")
def bundles(exports: Made[Path], once: Callable[[str, Callable[[Path], object]], Path]) -> Made[Path]:
    """Their bundles."""
    return Made(lambda precision: once(f"hybrid-bundle-{precision}", lambda folder: endless(exports[precision], folder, K)))


@pytest.fixture(scope="module")
def loaded(bundles: Made[Path]) -> Made[Outrider]:
    return Made(lambda precision: Outrider.load(bundles[precision]))


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


WHOLE = pytest.param("fp32", marks=pytest.mark.slow)


@pytest.mark.parametrize("precision", [SHORT, WHOLE])
@pytest.mark.parametrize("prompt", FEW)
def test_plain_text_is_that_of_transformers(
    targets: Made[Path], plain: Made[dict[str, list[Event]]], precision: str, prompt: str
) -> None:
    """Each token is the most likely one after all before it: so greedy text goes on, whoever writes it."""
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


@pytest.fixture(scope="module", params=[pytest.param("int4", marks=pytest.mark.slow), WHOLE, SHORT])
def batched(request: pytest.FixtureRequest, bundles: Made[Path]) -> tuple[Outrider, Outrider]:
    """A bundle with all of its slots, and with one."""
    return Outrider.load(bundles[request.param], slots=None), Outrider.load(bundles[request.param])


def alone(single: Outrider, prompt: list[int], params: SamplingParams) -> list[int]:
    return tokens(list(single.generate(prompt, params, k=0)))


def answer(scheduler: Scheduler, requests: list[tuple[list[int], SamplingParams]], cancelled: set[int]) -> list[list[int]]:
    """Serve requests, some of which are cancelled after a few tokens, and return the texts."""
    submitted = [scheduler.submit(prompt, params) for prompt, params in requests]
    texts: list[list[int]] = [[] for _ in requests]
    while scheduler.busy:
        for request, event in scheduler.step():
            if isinstance(event, OutriderError):
                raise event
            index = submitted.index(request)
            texts[index] += getattr(event, "token_ids", [])
            if index in cancelled and len(texts[index]) > 5:
                scheduler.cancel(request)
    return texts


@pytest.mark.parametrize("policy", ["auto", "at random"])
def test_many_at_once_get_what_each_gets_alone(batched: tuple[Outrider, Outrider], policy: str) -> None:
    """With requests that come and go, prompts longer than a chunk, and texts that go on where another one ended."""
    many, single = batched
    if policy == "at random":
        many.policy = RandomPolicy(many.adaptive_policy())
    prompts = [many.text.encode(PROMPTS[name], chat=False) for name in FEW]
    requests = [
        (prompts[index % len(prompts)], replace(SAMPLED[index % len(SAMPLED)], max_new_tokens=20 + 3 * index))
        for index in range(8)
    ]
    scheduler = Scheduler(many, max_waiting=16)
    texts = answer(scheduler, requests, cancelled={1, 4})
    for index, ((prompt, params), text) in enumerate(zip(requests, texts, strict=True)):
        want = alone(single, prompt, params)
        assert text == want[: len(text)]
        assert index in (1, 4) or len(text) == len(want)
    # What a slot holds can be gone on from at the end of its text alone.
    (prompt, params), text = requests[-1], texts[-1]
    longer = prompt + text + prompts[0]
    again = scheduler.submit(longer, SamplingParams(max_new_tokens=12))
    branch = scheduler.submit(prompt[:3] + prompts[1], SamplingParams(max_new_tokens=12))
    got: dict[int, list[int]] = {id(again): [], id(branch): []}
    while scheduler.busy:
        for request, event in scheduler.step():
            got[id(request)] += getattr(event, "token_ids", [])
    assert got[id(again)] == alone(single, longer, SamplingParams(max_new_tokens=12))
    assert got[id(branch)] == alone(single, prompt[:3] + prompts[1], SamplingParams(max_new_tokens=12))
    assert again.stats.cached_tokens == len(prompt) + len(text) - 1
    assert branch.stats.cached_tokens == 0


def test_a_failed_round_is_run_again_for_each_request_alone(
    batched: tuple[Outrider, Outrider], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state before the round is gone, so the texts are read again."""
    many, single = batched
    run = Rounds.run
    failures: list[int] = []

    def failing(self: Rounds, lanes: Sequence[Lane], *rest: Any, **named: Any) -> object:
        results = run(self, lanes, *rest, **named)
        if len(lanes) > 1 and len(lanes[0].tokens) > 50 and not failures:
            failures.append(len(lanes))
            raise EngineError("it broke", "hint it")
        return results

    monkeypatch.setattr(Rounds, "run", failing)
    requests = [(many.text.encode(PROMPTS[name], chat=False), SamplingParams(max_new_tokens=60)) for name in FEW]
    texts = answer(Scheduler(many, k=2), requests, cancelled=set())
    assert failures
    assert texts == [alone(single, *request) for request in requests]


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


def test_the_end_of_a_text_is_gone_on_from(bundles: Made[Path], loaded: Made[Outrider]) -> None:
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


SYSTEM = PROMPTS["longer than a chunk"]
USERS = ("Then", "But the dog", "Customer: Hi", "Question: Tom has 5 apples. How many")


def prefixed(many: Outrider) -> list[tuple[list[int], SamplingParams]]:
    """Requests whose prompts begin with the same tokens."""
    return [
        (many.text.encode(SYSTEM + user, chat=False), replace(params, max_new_tokens=20))
        for user, params in zip(USERS, [*SAMPLED, SAMPLED[0]], strict=True)
    ]


@pytest.mark.in_turn(runs=lambda case: case["batched"] in ("fp32", SHORT) or case["k"] in (0, "auto"))
@pytest.mark.parametrize("k", [0, 4, "auto", "at random"])
def test_a_shared_prefix_is_gone_on_from_a_snapshot(batched: tuple[Outrider, Outrider], k: int | str) -> None:
    """One after the other: the second request goes on from the last chunk before its own tokens, and later ones from these."""
    many, single = batched
    requests, shared = prefixed(many), len(many.text.encode(SYSTEM, chat=False))
    policy = RandomPolicy(many.adaptive_policy()) if k == "at random" else None
    scheduler, cached = Scheduler(many, k="auto" if policy else k, policy=policy), []
    for prompt, params in requests:
        request, got = scheduler.submit(prompt, params), list[int]()
        while scheduler.busy:
            for _, event in scheduler.step():
                got += getattr(event, "token_ids", [])
        assert got == alone(single, prompt, params)
        cached.append(request.stats.cached_tokens)
    assert cached[0] == 0
    assert shared - CHUNK < cached[1] <= shared
    assert min(cached[2:]) >= shared - 1


@pytest.mark.in_turn(runs=lambda case: case["batched"] in ("fp32", SHORT) or case["k"] in (4, "at random"))
@pytest.mark.parametrize("k", [0, 4, "auto", "at random"])
def test_requests_that_come_together_share_a_prefix(batched: tuple[Outrider, Outrider], k: int | str) -> None:
    many, single = batched
    requests = prefixed(many)
    policy = RandomPolicy(many.adaptive_policy()) if k == "at random" else None
    scheduler = Scheduler(many, k="auto" if policy else k, policy=policy)
    texts = answer(scheduler, requests, cancelled={0})
    for index, (request, text) in enumerate(zip(requests, texts, strict=True)):
        want = alone(single, *request)
        assert text == want[: len(text)]
        assert index == 0 or len(text) == len(want)


def test_nothing_goes_on_from_the_snapshots_of_a_request_that_fails(
    batched: tuple[Outrider, Outrider], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their states may be what it failed for, and another slot has the keys and values that belong to them."""
    many, _ = batched
    prompt, params = prefixed(many)[0]
    scheduler, run = Scheduler(many, k=0), Rounds.run
    failing, other = (scheduler.submit(prompt, params) for _ in range(2))

    def faulty(self: Rounds, lanes: Sequence[Lane], *rest: Any, **named: Any) -> object:
        if any(lane.tokens is failing.tokens for lane in lanes):
            raise EngineError("it broke", "hint it")
        return run(self, lanes, *rest, **named)

    monkeypatch.setattr(Rounds, "run", faulty)
    failed = []
    while scheduler.busy:
        failed += [request for request, result in scheduler.step() if isinstance(result, EngineError)]
    assert failed == [failing]
    assert other.finish_reason == "length"
    again = scheduler.submit(prompt, params)
    while scheduler.busy:
        scheduler.step()
    assert again.stats.cached_tokens == 0


@pytest.mark.parametrize("fault", ["no state", "that of another place"])
def test_a_wrong_state_changes_tokens(batched: tuple[Outrider, Outrider], fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above would notice. Some places have states that are nearly the right one."""
    many, single = batched
    target = many.sessions["target"]
    restore, wrong = target.restore, 1

    def faulty(place: int, slot: int, position: int) -> None:
        restore((place + wrong) % target.places, slot, position)
        if fault == "no state":
            target.restart(slot)
            target.assume(np.array([position]), slot)

    monkeypatch.setattr(target, "restore", faulty)
    want = [alone(single, *request) for request in prefixed(many)]
    noticed = False
    for wrong in range(1, 2 if fault == "no state" else target.places):  # noqa: B007  # `faulty` reads it
        scheduler, texts = Scheduler(many, k=0), []
        for request in prefixed(many):
            texts += answer(scheduler, [request], cancelled=set())
        noticed = noticed or texts != want
    assert noticed


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
