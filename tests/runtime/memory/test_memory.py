"""Drafting from earlier requests: the texts are plain decoding's, and owners learn nothing of each other."""

from __future__ import annotations

import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.audit.controls import RandomPolicy
from outrider.errors import FolderError, UsageError
from outrider.runtime.generation import Outrider
from outrider.runtime.grammar.structured import StructuredOutputs
from outrider.runtime.memory.memory import IDLE, Memory
from outrider.runtime.memory.suffixes import SuffixStore
from outrider.runtime.params import SamplingParams
from outrider.runtime.request import Event, Request
from outrider.runtime.scheduler import Scheduler
from outrider.tests.support import full_disk

LENGTH = 40
GREEDY = SamplingParams(max_new_tokens=LENGTH)
KINDS: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "seeded": SamplingParams(max_new_tokens=LENGTH, temperature=0.8, seed=3),
    "penalized": SamplingParams(max_new_tokens=LENGTH, frequency_penalty=0.5, logit_bias={7: 3.0}),
    "masked": SamplingParams(max_new_tokens=LENGTH, structured_outputs=StructuredOutputs(regex="[a-z ]{20,30}")),
}
SLOTS = 3


def load(bundle: Path, memory: Memory) -> Outrider:
    return Outrider.load(bundle, slots=SLOTS, memory=memory)


@pytest.fixture(scope="module")
def bundles(trained_bundles: Callable[..., Path]) -> Callable[[str], Path]:
    return lambda kind: trained_bundles(kind.split()[-1], backend=kind.split()[0], capacity=159, batch=SLOTS, k=[1, 4])


@pytest.fixture(scope="module")
def bundle(bundles: Callable[[str], Path]) -> Path:
    return bundles("onnxruntime fp32")


def ids(events: Sequence[Event]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def misremembered(memory: Memory, text: list[int], owner: object = None) -> None:
    """Remember a text of which every fifth token is another, so that proposals are accepted in part."""
    store = memory.store(owner, begin=True)
    assert store is not None
    store.append([token ^ 1 if at % 5 == 4 else token for at, token in enumerate(text)])


@pytest.mark.parametrize(
    "kind", ["onnxruntime fp32", "openvino int4", pytest.param("onnxruntime int4", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("params", KINDS)
def test_a_remembered_text_is_that_of_plain_decoding(bundles: Callable[[str], Path], kind: str, params: str) -> None:
    outrider = load(bundles(kind), memory := Memory())
    prompt, asked = outrider.text.encode("Once upon a time there was a little", chat=False), KINDS[params]
    plain = ids(list(outrider.generate(prompt, asked, k=0)))
    again = list(outrider.generate(prompt, asked, k=4, drafter="memory"))
    assert ids(again) == plain
    assert again[-1].stats.accepted > len(plain) // 2
    for k, drafter in ((4, "memory"), (1, "memory"), ("auto", None)):
        misremembered(memory, prompt + plain)
        assert ids(list(outrider.generate(prompt, asked, k=k, drafter=drafter))) == plain
    outrider.policy = RandomPolicy(outrider.adaptive_policy())
    misremembered(memory, prompt + plain)
    assert ids(list(outrider.generate(prompt, asked))) == plain


def play(scheduler: Scheduler, asked: Sequence[tuple[str, SamplingParams]], owner: str) -> list[Request]:
    """Run requests of one owner to their ends, the second one cancelled halfway if there are several."""
    encode = scheduler.bundle.text.encode
    requests = scheduler.submit_all([(encode(prompt, chat=False), params) for prompt, params in asked], owner)
    while scheduler.busy:
        scheduler.step()
        if len(requests) > 1 and requests[1].stats.emitted > 5 and requests[1].slot is not None:
            scheduler.cancel(requests[1])
    return requests


@pytest.mark.parametrize("kind", ["onnxruntime fp32", pytest.param("openvino int4", marks=pytest.mark.slow)])
def test_batches_with_prefixes_and_cancellation_are_plain_too(bundles: Callable[[str], Path], kind: str) -> None:
    outrider = load(bundles(kind), memory := Memory(owners=2))
    prefix = "The old man walked along the road, and the dog ran on before him. "
    cases = [(prefix + end, params) for end in ("Then", "But") for params in KINDS.values()]
    alone = [ids(list(outrider.generate(prompt, params, k=0))) for prompt, params in cases]
    accepted = 0
    for drafter in ("memory", None):
        scheduler = Scheduler(outrider, k="auto" if drafter is None else 4, drafter=drafter)
        for turn in range(3):
            for (prompt, _), text in zip(cases, alone, strict=True):
                misremembered(memory, outrider.text.encode(prompt, chat=False) + text, "a")
            requests = play(scheduler, cases, "a")
            for request, text in zip(requests, alone, strict=True):
                answer = request.tokens[len(request.prompt) :]
                assert answer[: len(text)] == text[: len(answer)]
                assert request.finish_reason is not None or request is requests[1]
            accepted += turn and sum(request.stats.accepted_by_drafter.get("memory", 0) for request in requests)
    assert accepted > 0


def test_what_is_drafted_for_one_owner_depends_on_no_other(bundle: Path) -> None:
    """By the tokens that are drafted. In the control, the others have the same owner."""
    first, others = [("Once upon a time", GREEDY)], [("Once upon a time", GREEDY), ("T", GREEDY), ("no no no", GREEDY)]

    def drafted(beside: str) -> list[list[int]]:
        """Return how many tokens were drafted for the owner a, by request and position. Another one asks before each."""
        scheduler, seen = Scheduler(load(bundle, Memory(1024, owners=2)), k=4, drafter="memory"), []
        for _ in range(3):
            if beside:
                play(scheduler, others, beside)
            (request,) = play(scheduler, first, "a")
            seen.append(request.stats.drafted_at)
        return seen

    alone = drafted("")
    assert not alone[0]  # there was nothing yet
    assert alone[1]
    assert drafted("b") == alone
    assert drafted("a") != alone


def test_each_owner_has_a_fixed_share_and_further_ones_have_none() -> None:
    memory, text = Memory(1000, owners=2), list(range(600))
    for owner in ("a", "b", "c"):
        store = memory.store(owner, begin=True)
        assert (store is None) == (owner == "c")
        if store is not None:
            store.append(text)
            assert len(store) == 500
    assert len(memory) == 1000
    assert memory.store("c") is None
    assert Memory(100, owners=3).store("a", begin=True) is None  # a share of 33 tokens is of no use


def test_of_unknown_owners_the_idle_are_forgotten() -> None:
    memory, now = Memory(1000, owners=1, open_ended=True), [0.0]
    memory.clock = lambda: now[0]
    assert memory.store("a", begin=True) is not None
    for minutes, there in ((50, True), (100, True), (170, False)):  # each use counts
        now[0] = 60.0 * minutes
        assert (memory.store("a") is not None) == there
    assert memory.store("b", begin=True) is not None
    now[0] += IDLE
    assert memory.store("a", begin=True) is None  # not a second too early
    now[0] += 1
    assert memory.store("a", begin=True) is not None


def test_a_request_may_neither_use_the_memory_nor_be_kept(bundle: Path) -> None:
    outrider = load(bundle, memory := Memory())
    private = SamplingParams(max_new_tokens=LENGTH, memory=False)
    for params in (private, SamplingParams(max_new_tokens=LENGTH, temperature=1.0, seed=1, rule="rejection")):
        *_, last = outrider.generate("Once upon a time", params, k=4, drafter="memory")
        assert (len(memory), last.stats.drafted) == (0, 0)  # a seed's answer may not depend on earlier requests
    list(outrider.generate("Once upon a time", GREEDY, k=0))
    assert len(memory) == len(outrider.text.encode("Once upon a time", chat=False)) + LENGTH + 1
    *_, last = outrider.generate("Once upon a time", private, k=4, drafter="memory")
    assert last.stats.drafted == 0
    *_, last = outrider.generate("Once upon a time", GREEDY, k=4, drafter="memory")
    assert last.stats.drafted > 0


def test_without_a_memory_nothing_can_be_drafted_from_it(bundle: Path) -> None:
    outrider = Outrider.load(bundle)
    assert "memory" not in outrider.drafters
    with pytest.raises(UsageError, match="no memory of earlier requests") as error:
        outrider.generate("T", drafter="memory")
    assert error.value.hint == "leave the drafter out, or load it with a memory"


def test_a_file_keeps_the_texts_for_this_user_only(bundle: Path, tmp_path: Path) -> None:
    outrider, file = load(bundle, memory := Memory(owners=2)), tmp_path / "memory"
    play(Scheduler(outrider), [("Once upon a time", GREEDY)], "a")
    memory.write(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert b"'a'" not in file.read_bytes()
    again = Memory(owners=2).read(file)
    assert len(again) == len(memory)
    for owner, there in (("a", True), ("b", False)):
        (request,) = play(Scheduler(load(bundle, again), k=4, drafter="memory"), [("Once upon a time", GREEDY)], owner)
        assert (request.stats.drafted > 0) == there
    assert len(Memory().read(tmp_path / "none yet")) == 0
    with pytest.raises(FolderError, match="cannot write"):
        Memory().read(tmp_path / "no folder" / "memory")
    with pytest.raises(FolderError, match="no room to write"), full_disk(100):
        memory.write(file)
    assert len(Memory(owners=2).read(file)) == len(memory)  # the old file is whole


def _damage(file: Path, content: dict[str, Any]) -> None:
    np.savez(file, **content)
    file.with_name(file.name + ".npz").replace(file)


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "no salt", "numbers", "negative", "a folder"])
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    file, memory = tmp_path / "memory", Memory()
    store = memory.store("a", begin=True)
    assert store is not None
    store.append([1, 2, 3])
    memory.write(file)
    with np.load(file) as saved:
        content = dict(saved)
    tokens = next(name for name in content if len(name) == 32)
    if damage in ("empty", "text"):
        file.write_text("" if damage == "empty" else "a text")
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-30])
    elif damage == "no salt":
        _damage(file, {name: value for name, value in content.items() if name != "salt"})
    elif damage == "a folder":
        file.unlink()
        file.mkdir()
    else:
        _damage(file, content | {tokens: content[tokens] * (0.5 if damage == "numbers" else -2)})
    with pytest.raises(FolderError, match="cannot read the memory"):
        Memory().read(file)


def test_the_memory_of_another_tokenizer_is_refused(bundle: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    outrider, file = load(bundle, memory := Memory()), tmp_path / "memory"
    list(outrider.generate("T", GREEDY))
    memory.write(file)
    with pytest.raises(UsageError, match="another tokenizer"):
        Outrider.load(tiny_bundle, memory=Memory().read(file))
    store = memory.store(None)
    assert isinstance(store, SuffixStore)
    store.append([10**6])  # which no embedding has
    memory.write(file)
    with pytest.raises(UsageError, match="another tokenizer"):
        load(bundle, Memory().read(file))
