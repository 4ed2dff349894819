"""The processes that read prompts and compute masks, with short limits and without a server."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from outrider.errors import EngineError, UsageError
from outrider.runtime.grammar.compiler import LocalGrammars
from outrider.runtime.grammar.errors import GrammarError
from outrider.runtime.grammar.structured import StructuredOutputs
from outrider.runtime.text.chat_template import ChatTemplate
from outrider.runtime.text.text import PromptTooLongError, Text
from outrider.serve.workers import grammars as serve_grammars
from outrider.serve.workers.grammars import GrammarBusyError, RemoteGrammars, RemoteMatcher
from outrider.serve.workers.messages import PromptJob
from outrider.serve.workers.prompts import PromptEncoder
from outrider.serve.workers.worker_main import LAST, MEMORY, NICE
from outrider.serve.workers.workers import Workers
from outrider.tests.serve.processes import children, end, ids, only, wait
from outrider.tests.support import tokenizer

VOCABULARY = tokenizer().get_vocab_size()
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATE = "{% if messages[0].content == 'loop' %}" + LOOPS + "{% endif %}{{ messages[0].content }}"
LIMITS = {"JOB_SECONDS": 1, "GRAMMAR_SECONDS": 0.6, "MASK_SECONDS": 0.3, "BURST": 0.4, "SHARE": 0, "GRAMMAR_MEMORY": 32 << 20}
HASTY = f"import outrider.serve.workers.worker_main as it; it.__dict__.update({LIMITS}); it.main()"
LETTERS = StructuredOutputs(regex="(ab|b){1,40}")
AMBIGUOUS = StructuredOutputs(grammar='start: s\ns: s s | s s s | "a" |')
FACTORS = [{"type": "integer", "multipleOf": each} for each in (4, 5, 7, 11, 13)]


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    started = subprocess.Popen

    def hasty(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        assert command[1:4] == ["-P", "-m", "outrider.serve.workers.worker_main"]
        return started([sys.executable, "-P", "-c", HASTY, *command[4:]], **options)

    made = Workers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", hasty)
        patch.setattr("outrider.serve.workers.prompts.JOB_SECONDS", LIMITS["JOB_SECONDS"])
        patch.setattr(serve_grammars, "GRAMMAR_SECONDS", LIMITS["GRAMMAR_SECONDS"])
        made.start(Text(tokenizer(), ChatTemplate(TEMPLATE, {})), VOCABULARY, [0])
        yield made
        made.close()


@pytest.fixture
def encoder(workers: Workers) -> Iterator[PromptEncoder]:
    yield PromptEncoder(workers)
    end(workers)


@pytest.fixture
def grammars(workers: Workers) -> Iterator[RemoteGrammars]:
    yield RemoteGrammars(workers, VOCABULARY, [0])
    end(workers)


def encode(encoder: PromptEncoder, **job: Any) -> list[list[int]]:
    return asyncio.run(encoder.encode(PromptJob(**({"limit": 50} | job))))


def says(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_a_prompt_that_takes_too_long_ends_and_delays_no_other(encoder: PromptEncoder) -> None:
    async def beside() -> float:
        stuck = asyncio.create_task(encoder.encode(PromptJob(limit=50, messages=says("loop"))))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        assert await encoder.encode(PromptJob(limit=50, messages=says("fox"))) == [ids("fox")]
        taken = time.monotonic() - began
        assert not stuck.done()
        with pytest.raises(UsageError, match="takes longer than"):
            await asyncio.wait_for(stuck, 20)
        return taken

    assert encode(encoder, messages=says("fox")) == encode(encoder, texts=["fox"]) == [ids("fox")]
    assert asyncio.run(beside()) < 0.9  # less than the other's limit
    assert encode(encoder, messages=says("fox")) == [ids("fox")]


def test_a_worker_has_little_memory_and_comes_last(encoder: PromptEncoder, workers: Workers) -> None:
    encode(encoder, texts=["fox"])
    for child in children(workers):
        assert child.rlimit(psutil.RLIMIT_AS) == (MEMORY, MEMORY)
        assert child.nice() >= NICE


def test_a_prompt_of_more_tokens_than_allowed_is_not_sent(encoder: PromptEncoder) -> None:
    for job in ({"texts": ["fox", "fox " * 40]}, {"messages": says("fox " * 40)}):
        with pytest.raises(PromptTooLongError, match="limit is 50"):
            encode(encoder, **job)


def test_a_worker_that_dies_is_one_error(encoder: PromptEncoder, workers: Workers) -> None:
    async def killed() -> None:
        reading = asyncio.create_task(encoder.encode(PromptJob(limit=50, messages=says("loop"))))
        await asyncio.sleep(0.3)
        for child in children(workers):
            child.kill()
        await reading

    encode(encoder, texts=["fox"])
    with pytest.raises(EngineError, match="has crashed"):
        asyncio.run(killed())
    assert encode(encoder, texts=["fox"])
    end(workers)
    assert workers.process is not None
    workers.process.kill()  # the one that they are forked from
    workers.process.wait()
    assert encode(encoder, texts=["fox"])


def test_a_grammar_is_tried(grammars: RemoteGrammars) -> None:
    asyncio.run(grammars.compile(StructuredOutputs(regex="[a-z]+"), "owner"))
    with pytest.raises(UsageError, match="grammar"):
        asyncio.run(grammars.compile(StructuredOutputs(grammar="start: ("), "owner"))


def test_a_grammar_is_compiled_once_for_all_answers_of_its_owner(grammars: RemoteGrammars, workers: Workers) -> None:
    """And compiling another one leaves the answers that have begun where they are, in one process for each owner."""
    asyncio.run(grammars.compile(LETTERS, "owner"))
    begun = wait(grammars.begin(LETTERS, "owner"))
    begun.advance(ids("ab"))
    wait(begun)
    compiled = only(workers)
    asyncio.run(grammars.compile(LETTERS, "owner"))
    assert only(workers) == compiled
    for count in range(2, 8):
        asyncio.run(grammars.compile(StructuredOutputs(regex=f"b{{1,{count}}}"), "owner"))
        begun.advance(ids("b"))
        wait(begun)
    want = LocalGrammars(tokenizer(), VOCABULARY, [0]).begin(LETTERS)
    want.advance(ids("ab" + "b" * 6))
    assert np.array_equal(begun.masks([])[0][0], want.masks([])[0][0])
    wait(grammars.begin(LETTERS, "owner"))
    assert only(workers) != compiled


def test_a_grammar_that_is_tried_holds_up_no_answer(grammars: RemoteGrammars, workers: Workers) -> None:
    """Its process ends by a limit, and not the one of its owner's answers."""

    async def beside() -> float:
        trying = asyncio.create_task(
            grammars.compile(StructuredOutputs(json={"type": "integer", "multipleOf": 99999989}), "owner")
        )
        await asyncio.sleep(0.1)
        began = time.monotonic()
        matcher.advance(ids("ab"))
        assert (await asyncio.to_thread(wait, matcher)).masks([])[0][0].any()
        taken = time.monotonic() - began
        assert not trying.done()
        with pytest.raises(UsageError, match="longer than"):
            await trying
        return taken

    matcher = grammars.begin(LETTERS, "owner")
    wait(matcher)
    (child,) = children(workers)
    assert asyncio.run(beside()) < 0.3
    assert child.is_running()


def test_masks_are_those_of_this_process(grammars: RemoteGrammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind drafted tokens that are in the grammar, that leave it, and that were rejected."""
    monkeypatch.setattr(serve_grammars, "PATIENCE", 10.0)
    monkeypatch.setattr(serve_grammars, "SAVED", 10.0)
    remote, local = grammars.begin(LETTERS, "owner"), LocalGrammars(tokenizer(), VOCABULARY, [0]).begin(LETTERS)
    steps = [("", "abbab"), ("ab", "ba"), ("b", "xab"), ("b", ""), ("ababab", "abx")]
    for said, drafted in steps:
        for each in (remote, local):
            each.advance(ids(said))
        wait(remote)
        for count in range(len(ids(drafted)) + 1):
            (got, rows), (want, same) = (each.masks(ids(drafted)[:count]) for each in (remote, local))
            assert (len(got), rows) == (len(want), same)
            assert all(np.array_equal(*each) for each in zip(got, want, strict=True))
        assert remote.valid(ids(drafted)) == local.valid(ids(drafted))
        assert remote.forced(8) == local.forced(8)


def test_what_a_grammar_forces_is_valid_without_asking_its_worker(grammars: RemoteGrammars, workers: Workers) -> None:
    matcher = wait(grammars.begin(StructuredOutputs(choice=["aabbab"]), "owner"))
    forced = matcher.forced(8)
    end(workers)  # none could answer
    assert len(forced) > 1
    assert [matcher.valid(forced[:count]) for count in range(len(forced) + 1)] == [*range(len(forced) + 1)]


def test_an_answer_continues_when_its_worker_has_died(grammars: RemoteGrammars, workers: Workers) -> None:
    matcher = grammars.begin(LETTERS, "owner")
    matcher.advance(ids("ab"))
    want = wait(matcher).masks([])[0][0]
    for child in children(workers):
        child.kill()
    matcher.advance([])
    assert np.array_equal(wait(matcher).masks([])[0][0], want)


def test_a_mask_that_is_late_is_not_waited_for(grammars: RemoteGrammars, workers: Workers) -> None:
    """The answer drafts nothing then, and is not ready for a round."""
    slow = grammars.begin(LETTERS, "slow")
    wait(slow).masks([])
    before = children(workers)
    for child in before:
        os.kill(child.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        masks, rows = slow.masks(ids("abab"))
        assert (len(masks), rows) == (1, 1)
        assert slow.valid(ids("ab")) == 0
        assert slow.forced(4) == []
        slow.advance(ids("ab"))
        assert not slow.ready()
        assert time.monotonic() - began < 2
    finally:
        for child in before:
            os.kill(child.pid, signal.SIGCONT)
    want = LocalGrammars(tokenizer(), VOCABULARY, [0]).begin(LETTERS)
    want.advance(ids("ab"))
    assert np.array_equal(wait(slow).masks([])[0][0], want.masks([])[0][0])


def test_the_engines_wait_for_masks_in_a_share_of_the_time(grammars: RemoteGrammars, workers: Workers) -> None:
    """However many owners there are."""
    slow = {owner: wait(grammars.begin(LETTERS, owner)) for owner in "abc"}
    before = children(workers)
    for child in before:
        os.kill(child.pid, signal.SIGSTOP)
    try:
        for owner, each in slow.items():
            each.advance(ids("ab"))
            while each.ready() or grammars.owners[owner].patience(3) > 0:  # what it had saved up
                pass
        waited, began = 0.0, time.monotonic()
        while (passed := time.monotonic() - began) < 0.8:
            for each in slow.values():
                asked = time.monotonic()
                assert not each.ready()
                waited += time.monotonic() - asked
            time.sleep(0.005)
        assert waited < 0.2 * passed
    finally:
        for child in before:
            os.kill(child.pid, signal.SIGCONT)


def test_the_memory_of_an_owners_grammars_is_bounded(grammars: RemoteGrammars, workers: Workers) -> None:
    """Those that nobody uses any more make room; if that is not enough, the one that comes last fails, and the others go on."""

    def schema(title: int) -> StructuredOutputs:
        return StructuredOutputs(json={"title": str(title), "allOf": FACTORS})

    for title in range(6):
        wait(grammars.begin(schema(title), "owner")).masks([])
    (child,) = children(workers)
    assert workers.process is not None
    assert child.memory_info().rss < psutil.Process(workers.process.pid).memory_info().rss + (48 << 20)
    begun, failed = list[RemoteMatcher](), ""
    for title in range(100, 110):
        matcher = grammars.begin(schema(title), "owner")
        try:
            wait(matcher).masks([])
            begun.append(matcher)
        except GrammarError as error:
            failed = str(error)
            break
    assert "memory" in failed
    assert begun
    for matcher in begun:
        matcher.advance([])
        assert wait(matcher).masks([])[0][0].any()


def test_what_takes_much_of_the_processor_comes_last(grammars: RemoteGrammars, workers: Workers) -> None:
    matcher = grammars.begin(AMBIGUOUS, "owner")
    for _ in range(140):  # each takes longer than the one before
        matcher.advance(ids("a"))
        wait(matcher)
        if all(child.nice() == LAST for child in children(workers)):
            break
    assert [child.nice() for child in children(workers)] == [LAST]


def test_a_step_that_takes_too_long_ends_its_answer_alone(grammars: RemoteGrammars) -> None:
    slow, other = grammars.begin(AMBIGUOUS, "owner"), grammars.begin(LETTERS, "owner")
    slow.advance(ids("a" * 500))
    with pytest.raises(GrammarError, match=r"too long|too complex"):
        wait(slow).masks([])
    other.advance(ids("ab"))
    assert wait(other).masks([])[0][0].any()


def test_the_owners_of_grammars_are_not_too_many(grammars: RemoteGrammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """One without an answer makes room."""
    monkeypatch.setattr(serve_grammars, "MAX_OWNERS", 2)
    begun = [wait(grammars.begin(LETTERS, owner)) for owner in "ab"]
    with pytest.raises(GrammarBusyError):
        wait(grammars.begin(LETTERS, "c")).masks([])
    begun.pop()
    assert wait(grammars.begin(LETTERS, "c")).masks([])[0][0].any()
