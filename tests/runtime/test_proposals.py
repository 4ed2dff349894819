"""Draft models, heads and parallel drafts propose what a fresh reading of the text gives, whatever happened before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.audit.controls import RandomPolicy
from outrider.runtime import drafters
from outrider.runtime.drafters.step import StepDrafter
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.policy.policy import FixedPolicy
from outrider.runtime.request import Request
from outrider.runtime.rounds.buffers import Lane, Shape
from outrider.runtime.rounds.launches import Launches
from outrider.runtime.rounds.rounds import RoundResult
from outrider.runtime.scheduler import Scheduler
from outrider.tests.deferred import deferred
from outrider.tests.drafts import parallel_draft, plain_block_head, random_block_head, random_head, random_parallel_head
from outrider.tests.runtime.policies import short_windows
from outrider.tests.runtime.references import (
    BlockReference,
    HeadReference,
    ModelReference,
    ParallelHeadReference,
    ParallelReference,
    Reference,
)
from outrider.tests.support import PAIR

PROMPT = "Customer: Hi, I would like to book a table for two in San Jose.\nAgent:"
K = (1, 2, 4, 8)
KINDS = [
    ("onnxruntime", "trained head"),
    ("openvino", "trained head"),
    ("openvino", "random parallel-head"),
    ("onnxruntime", "random block"),
    ("openvino", "trained parallel"),
    ("onnxruntime", "plain block"),
    ("onnxruntime", "random head"),
    ("onnxruntime", "random parallel"),
    ("onnxruntime", "trained model"),
    ("openvino", "trained model"),
]
SLOW = [KINDS[1], *KINDS[6:8]]
Proposed = tuple[tuple[int, ...], tuple[int, ...]]
"""The confirmed tokens that the drafter has read, and what it drafted after them."""


class Recorder:
    """Notes what a drafter proposes."""

    def __init__(self, drafter: str) -> None:
        self.drafter = drafter
        self.proposed: list[Proposed] = []
        self.windowed = 0  # times that it had read only the end of the text

    def __call__(self, launches: Launches, shape: Shape, index: int, lane: Lane, result: RoundResult) -> RoundResult:
        if result.drafter == self.drafter:
            drafter = launches.on_device(shape)
            assert isinstance(drafter, StepDrafter)
            offset = drafter.offset(shape.first + index)
            self.windowed += offset > 0
            self.proposed.append((tuple(lane.tokens[offset:]), tuple(result.drafted)))
        return result


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=pytest.mark.slow) if each in SLOW else each for each in KINDS],
    ids=" ".join,
)
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The backend and the drafter."""
    named: tuple[str, str] = request.param
    return named


@pytest.fixture(scope="module")
def drafter(kind: tuple[str, str]) -> str:
    return kind[1].split()[1]


@pytest.fixture(scope="module")
def reference(kind: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Reference:
    made, (how, what) = tmp_path_factory.mktemp("reference") / "draft", kind[1].split()
    if what == "model":
        return ModelReference(PAIR / "draft")
    if what == "parallel":
        return ParallelReference(PAIR / what if how == "trained" else parallel_draft(made))
    if what == "block":
        return BlockReference(random_block_head(made) if how == "random" else plain_block_head(made))
    if what == "parallel-head":
        return ParallelHeadReference(random_parallel_head(made))
    return HeadReference(PAIR / what if how == "trained" else random_head(made))


@pytest.fixture(scope="module")
def bundle(kind: tuple[str, str], drafter_bundles: Callable[..., Path]) -> Path:
    beside = "trained parallel" if kind[1] == "trained model" else kind[1]
    return drafter_bundles("fp32", beside, backend=kind[0], capacity=512, batch=4)


@pytest.fixture(scope="module")
def loaded(bundle: Path) -> Iterator[Outrider]:
    with short_windows():
        yield Outrider.load(bundle, slots=4)


@pytest.fixture
def recorded(loaded: Outrider, drafter: str) -> tuple[Outrider, Recorder]:
    recorder = Recorder(drafter)
    return loaded.observed(recorder), recorder


def check(reference: Reference, proposed: list[Proposed], least: int, exactly: bool = False) -> None:
    """Compare proposals; `exactly` says that each round drafted as many tokens as it verified."""
    assert len(proposed) >= least
    for tokens, drafted in sorted({*proposed}, key=lambda each: -len(each[0])):  # a text before its beginnings
        # The rows of a block see each other, and a round may draft more than it verifies, or than a lane can emit.
        begun = range(len(drafted), 9 if isinstance(reference, BlockReference) and not exactly else len(drafted) + 1)
        assert any(drafted == reference.proposes(tokens, count)[: len(drafted)] for count in begun)


def in_turn(case: dict[str, Any]) -> bool:
    """Each k with every other drafter."""
    return (KINDS.index(case["kind"]) + K.index(case["k"])) % 2 == 0


@pytest.mark.in_turn(runs=in_turn)
@pytest.mark.parametrize("k", K)
def test_its_proposals_are_those_of_eager_transformers(
    recorded: tuple[Outrider, Recorder], reference: Reference, drafter: str, k: int
) -> None:
    outrider, recorder = recorded
    list(outrider.generate(PROMPT, SamplingParams(max_new_tokens=40), k=k, drafter=drafter))
    check(reference, recorder.proposed, 4, exactly=True)


@pytest.mark.in_turn(runs=lambda case: KINDS.index(case["kind"]) % 2 == 0)
def test_after_plain_rounds_and_those_of_other_drafters(recorded: tuple[Outrider, Recorder], reference: Reference) -> None:
    outrider, recorder = recorded
    outrider.policy = RandomPolicy(outrider.adaptive_policy())
    for seed in range(3):
        list(outrider.generate(PROMPT, SamplingParams(max_new_tokens=60, temperature=0.5, seed=seed, repetition_penalty=1.1)))
    greedy = len(recorder.proposed)
    list(outrider.generate(PROMPT, SamplingParams(max_new_tokens=100)))
    check(reference, recorder.proposed[greedy:], 5)
    assert (recorder.windowed > 0) == bool(drafters.get(recorder.drafter).windows)


@pytest.mark.in_turn(runs=lambda case: KINDS.index(case["kind"]) % 2 == 1)
def test_after_a_prefix_from_another_request(recorded: tuple[Outrider, Recorder], reference: Reference, drafter: str) -> None:
    """The prompts differ in their last words or are each other's beginnings, and earlier answers are in the slots."""
    outrider, recorder = recorded
    scheduler = Scheduler(outrider, policy=FixedPolicy(drafter, 4))
    long = 4 * PROMPT
    prompts = [long, long + " What", 3 * PROMPT + " Where", long, long[:-30]]
    for at, prompt in enumerate(prompts):
        request = scheduler.submit(outrider.text.encode(prompt, chat=False), SamplingParams(max_new_tokens=30))
        while scheduler.busy:
            scheduler.step()
        assert (request.stats.cached_tokens > 40) == (at > 0)
    check(reference, recorder.proposed, 15, exactly=True)


@pytest.mark.in_turn(runs=lambda case: KINDS.index(case["kind"]) % 2 == 0)
def test_after_a_prefix_copied_from_another_slot(
    recorded: tuple[Outrider, Recorder], reference: Reference, drafter: str
) -> None:
    """From a request that is still running, one that has ended, and one that comes at the same time."""
    outrider, recorder = recorded
    scheduler = Scheduler(outrider, policy=FixedPolicy(drafter, 4))
    system = 4 * PROMPT

    def submit(user: str, count: int) -> Request:
        return scheduler.submit(outrider.text.encode(system + user, chat=False), SamplingParams(max_new_tokens=count))

    running = submit("", 60)
    while running.stats.emitted < 10:
        scheduler.step()
    later = [submit(" What", 10), submit(" Where", 20)]
    while scheduler.busy:
        scheduler.step()
    later.append(submit(" Who", 20))
    while scheduler.busy:
        scheduler.step()
    assert all(request.stats.copied_tokens > 40 for request in later)
    check(reference, recorder.proposed, 15)


def test_a_block_head_is_as_sure_of_its_proposals_as_in_eager_transformers(
    drafter_bundles: Callable[..., Path], tmp_path: Path
) -> None:
    bundle = drafter_bundles("fp32", "random block", backend="onnxruntime", capacity=512, batch=4)
    sure: list[tuple[tuple[int, ...], list[float]]] = []

    def note(launches: Launches, shape: Shape, index: int, lane: Lane, result: RoundResult) -> RoundResult:
        drafter = launches.on_device(shape)
        if drafter is not None and len(result.drafted) == 4:
            sure.append((tuple(lane.tokens), [drafter.confidence(row, shape) for row in range(4)]))
        return result

    list(Outrider.load(bundle).observed(note).generate(PROMPT, SamplingParams(max_new_tokens=10), k=4, drafter="block"))
    reference = BlockReference(random_block_head(tmp_path / "draft"))
    assert len(sure) >= 2
    for tokens, confidences in sure:
        np.testing.assert_allclose(confidences, reference.drafts(tokens, 4)[1], atol=1e-4)


@pytest.mark.in_turn(runs=lambda case: (case["rule"] == "rejection") != (case["named"] == "trained parallel"))
@pytest.mark.parametrize("named", ["trained head", "trained parallel", "random block"])
@pytest.mark.parametrize("rule", ["rejection", "exact-match"])
def test_on_a_device_that_runs_ahead(drafter_bundles: Callable[..., Path], named: str, rule: Any) -> None:
    """Where a sampler needs more candidates, the target has already written over what a head's steps had left."""
    bundle = drafter_bundles("fp32", named, backend="onnxruntime", capacity=512, batch=4)
    drafter = named.split()[1]
    params = SamplingParams(max_new_tokens=40, temperature=2.0, top_p=0.999, seed=4, rule=rule)  # no draw on a boundary
    proposed = []
    for outrider in (Outrider.load(bundle), deferred(bundle), deferred(bundle, max_candidates=256)):
        recorder = Recorder(drafter)
        list(outrider.observed(recorder).generate(PROMPT, params, k=4, drafter=drafter))
        proposed.append(recorder.proposed)
    assert len(proposed[0]) > 10
    assert proposed[0] == proposed[1] == proposed[2]


@pytest.mark.in_turn(runs=lambda case: KINDS.index(case["kind"]) % 2 == 1)
def test_in_batches_whose_requests_come_and_go(recorded: tuple[Outrider, Recorder], reference: Reference) -> None:
    """Slots are moved, cancelled in the middle, and taken over while their neighbours go on."""
    outrider, recorder = recorded
    scheduler = Scheduler(outrider, policy=RandomPolicy(outrider.adaptive_policy()))
    texts = [PROMPT, "Question: Tom has 5 apples and buys 7 more.", '"""Write a function to add two numbers."""\ndef', "T"]
    prompts, requests = [outrider.text.encode(text, chat=False) for text in texts], []
    for at in range(12):
        requests.append(scheduler.submit(prompts[at % 4], SamplingParams(max_new_tokens=12 + 7 * (at % 4))))
        for _ in range(3):
            scheduler.step()
        if at % 3 == 2:
            scheduler.cancel(requests[at - 1])
    while scheduler.busy:
        scheduler.step()
    check(reference, recorder.proposed, 10)
    assert (recorder.windowed > 0) == bool(drafters.get(recorder.drafter).windows)


def test_features_and_entries_are_those_of_a_fresh_prefill(loaded: Outrider, drafter: str) -> None:
    list(loaded.generate(PROMPT, SamplingParams(max_new_tokens=40), k=4, drafter=drafter))
    tokens, step = loaded.decoder.slots[0].tokens, loaded.decoder.drafters[drafter]
    assert isinstance(step, StepDrafter)
    step.catch_up(0, tokens, 0, len(tokens))
    roles, shift = ("target", step.role), step.shift
    before = {role: {name: kept[0].copy() for name, kept in loaded.sessions[role].cache().items()} for role in roles}
    target, own, end = loaded.sessions["target"], loaded.sessions[step.role], len(tokens) - 1
    for at in range(0, end, 16):
        rows = slice(at, min(at + 16, end))
        target.write(np.array([tokens[rows]]), np.array([at]))
        own.write(np.array([step.context_ids(tokens[at + shift : rows.stop + shift])]), np.array([at]))
    entries = end - 9  # the context of the last round's successor was not written yet
    for role in roles:
        for name, kept in loaded.sessions[role].cache().items():
            np.testing.assert_allclose(kept[0][:, :entries], before[role][name][:, :entries], atol=2e-4, rtol=1e-4)
    step.truncate(0, 0)
