"""Drafting from earlier requests: the texts are plain decoding's, and owners learn nothing of each other."""

from __future__ import annotations

import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.audit.controls import RandomPolicy
from outrider.bundle.folder import read_manifest
from outrider.errors import FolderError, UsageError
from outrider.runtime.generation import Outrider
from outrider.runtime.grammar.structured import StructuredOutputs
from outrider.runtime.memory.memory import IDLE, Memory
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
    """Remember a text with every fifth token changed, so that proposals are accepted in part."""
    memory.append(owner, [token ^ 1 if at % 5 == 4 else token for at, token in enumerate(text)], 0)


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
    outrider = load(bundles(kind), memory := Memory(owners=("a", "b")))
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
        scheduler, seen = Scheduler(load(bundle, Memory(1024, owners=("a", "b"))), k=4, drafter="memory"), []
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


def held(memory: Memory, owner: str, length: int = 600) -> int:
    """Return how many more tokens a memory has after a text of an owner."""
    before = len(memory)
    memory.append(owner, list(range(length)), 0)
    return len(memory) - before


def test_each_owner_has_a_fixed_share_and_no_other_one_has() -> None:
    memory = Memory(1000, owners=("a", "b"))
    assert [held(memory, owner) for owner in ("a", "b", "c")] == [500, 500, 0]
    assert [len(memory.propose(owner, [598], 2)[0]) for owner in ("a", "b", "c")] == [0, 0, 0]
    assert [memory.propose(owner, [590, 591], 2)[0] for owner in ("a", "b", "c")] == [[592, 593], [592, 593], []]
    for tokens in (0, -5, 127):
        with pytest.raises(UsageError, match="are fewer than 64 for each"):
            Memory(tokens, owners=("a", "b"))


def test_of_unknown_owners_the_idle_are_forgotten() -> None:
    now = [0.0]
    memory = Memory(1000, owners=("known",), places=1, clock=lambda: now[0])
    assert held(memory, "a") > 0
    for minutes, there in ((50, True), (100, True), (170, False)):  # each use counts
        now[0] = 60.0 * minutes
        assert (memory.propose("a", [590, 591], 1)[0] == [592]) == there
    assert held(memory, "b") == held(memory, "known") == 500
    now[0] += IDLE
    assert held(memory, "a") == 0  # not a second too early
    now[0] += 1
    assert held(memory, "a") == 0  # in the place of b
    assert (memory.propose("a", [590, 591], 1)[0], memory.propose("known", [590, 591], 1)[0]) == ([592], [592])


def test_the_commonest_answer_to_a_repeated_question_is_proposed() -> None:
    memory, question = Memory(), list(range(100, 130))
    for answer in ([1, 2, 3], [1, 2, 3], [7, 8, 9]):
        memory.append(None, question + answer, len(question))
    assert memory.propose(None, question, 3) == ([1, 2, 3], 8)


def test_the_memory_allocates_only_when_an_owner_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(owners=("a", "b"))
    held(memory, "a")
    monkeypatch.setattr(np, "zeros", None)
    memory.propose("a", [1, 2], 4)
    memory.propose("b", [1, 2], 4)


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
    assert error.value.hint == "leave the drafter out, or give it a memory (--memory FILE)"


def test_a_prompt_in_numpys_integers_is_remembered(bundle: Path) -> None:
    outrider = load(bundle, Memory())
    prompt: Any = np.array(outrider.text.encode("Once upon a time", chat=False))
    texts = [ids(list(outrider.generate(prompt, GREEDY, k=4, drafter="memory"))) for _ in range(2)]
    assert texts[0] == texts[1]


def test_a_file_keeps_the_texts_for_this_user_only(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(file := tmp_path / "memory")
    outrider = load(bundle, memory := Memory(file=tmp_path / "link", owners=("a", "b")))
    play(Scheduler(outrider), [("Once upon a time", GREEDY)], "a")
    memory.write()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert (tmp_path / "link").is_symlink()
    assert b"'a'" not in file.read_bytes()
    for owners, there in ((("b", "a"), {"a"}), (("b", "c"), set())):  # who is not known any more is forgotten
        again = Memory(file=file, owners=owners)
        assert len(again) == (len(memory) if there else 0)
        for owner in owners:
            (request,) = play(Scheduler(load(bundle, again), k=4, drafter="memory"), [("Once upon a time", GREEDY)], owner)
            assert (request.stats.drafted > 0) == (owner in there)
    with pytest.raises(FolderError, match="cannot write"):
        Memory(file=tmp_path / "no folder" / "memory")
    with pytest.raises(FolderError, match="no room to write"), full_disk(100):
        memory.write()
    assert len(Memory(file=str(file), owners=("a", "b"))) == len(memory)  # the old file is whole


DAMAGES = ["empty", "text", "cut", "an array", "no salt", "long salt", "numbers", "negative", "large", "a folder"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_in_one_line(bundle: Path, tmp_path: Path, damage: str) -> None:
    memory = Memory(file=(file := tmp_path / "memory"))
    memory.attach(read_manifest(bundle))
    memory.append(None, [1, 2, 3], 0)
    memory.write()
    with np.load(file) as saved:
        content: dict[str, Any] = dict(saved)
    tokens = next(name for name in content if len(name) == 32)
    changed = {
        "no salt": {"salt": np.array([])},
        "long salt": {"salt": np.zeros(99, np.uint8)},
        "numbers": {tokens: content[tokens] * 0.5},
        "negative": {tokens: content[tokens] * -2},
        "large": {tokens: content[tokens] * 10**6},
    }
    if damage in changed:
        np.savez(file, **content | changed[damage])
        file.with_name(file.name + ".npz").replace(file)
    elif damage == "an array":
        with file.open("wb") as opened:
            np.save(opened, content[tokens])
    elif damage == "a folder":
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes({"empty": b"", "text": b"a text"}.get(damage, file.read_bytes()[:-30]))
    with pytest.raises(FolderError, match="cannot read the memory"):
        Memory(file=file)


def test_the_memory_of_another_model_is_refused(bundle: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    outrider = load(bundle, memory := Memory(file=tmp_path / "memory"))
    list(outrider.generate("T", GREEDY))
    memory.write()
    for each in (memory, Memory(file=tmp_path / "memory")):
        with pytest.raises(UsageError, match="another vocabulary"):
            Outrider.load(tiny_bundle, memory=each)
