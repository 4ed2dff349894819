"""The process that reads prompts, with a limit of a second and without a server."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from outrider.errors import EngineError, UsageError
from outrider.runtime.chat_template import ChatTemplate
from outrider.runtime.text import PromptTooLongError, Text
from outrider.serve.prompts import PromptEncoder
from outrider.serve.prompts_child import MEMORY, NICE, Job
from outrider.tests.support import tokenizer

LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATE = "{% if messages[0].content == 'loop' %}" + LOOPS + "{% endif %}{{ messages[0].content }}"
HASTY = "import outrider.serve.prompts_child as it; it.JOB_SECONDS = 1.0; it.main()"


@pytest.fixture(scope="module")
def encoder() -> Iterator[PromptEncoder]:
    started = subprocess.Popen

    def hasty(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        assert command[1:] == ["-P", "-m", "outrider.serve.prompts_child"]
        return started([sys.executable, "-P", "-c", HASTY], **options)

    made = PromptEncoder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", hasty)
        made.start(Text(tokenizer(), ChatTemplate(TEMPLATE, {})), 320, [0])
        yield made
        made.close()


def encode(encoder: PromptEncoder, **job: Any) -> list[list[int]]:
    return asyncio.run(encoder.encode(Job(**({"limit": 50} | job)), places=4))


def says(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_a_prompt_that_takes_too_long_ends_and_the_next_is_read(encoder: PromptEncoder) -> None:
    want = [tokenizer().encode("fox").ids]
    assert encode(encoder, messages=says("fox")) == encode(encoder, texts=["fox"]) == want
    with pytest.raises(UsageError, match="takes longer than"):
        asyncio.run(asyncio.wait_for(encoder.encode(Job(limit=50, messages=says("loop")), places=4), 8))
    assert encode(encoder, messages=says("fox")) == want


def test_a_limit_holds_for_one_job_and_not_for_the_idle_process(encoder: PromptEncoder) -> None:
    encode(encoder, texts=["fox"])
    assert encoder.child is not None
    before = encoder.child.pid
    time.sleep(1.2)
    encode(encoder, texts=["fox"])
    assert encoder.child.pid == before


def test_the_process_has_little_memory_and_comes_last(encoder: PromptEncoder) -> None:
    encode(encoder, texts=["fox"])
    assert encoder.child is not None
    child = psutil.Process(encoder.child.pid)
    assert child.rlimit(psutil.RLIMIT_AS) == (MEMORY, MEMORY)
    assert child.nice() >= NICE


def test_a_prompt_of_more_tokens_than_allowed_is_not_sent(encoder: PromptEncoder) -> None:
    for job in ({"texts": ["fox", "fox " * 40]}, {"messages": says("fox " * 40)}):
        with pytest.raises(PromptTooLongError, match="limit is 50"):
            encode(encoder, **job)


def test_a_grammar_is_tried(encoder: PromptEncoder) -> None:
    assert encode(encoder, structured={"regex": "[a-z]+"}) == []
    with pytest.raises(UsageError, match="grammar"):
        encode(encoder, structured={"grammar": "start: ("})


def test_a_process_that_dies_is_one_error(encoder: PromptEncoder) -> None:
    async def killed() -> None:
        reading = asyncio.create_task(encoder.encode(Job(limit=50, messages=says("loop")), places=4))
        await asyncio.sleep(0.1)
        assert encoder.child is not None
        encoder.child.kill()
        await reading

    encode(encoder, texts=["fox"])
    with pytest.raises(EngineError, match="has crashed"):
        asyncio.run(killed())
    assert encode(encoder, texts=["fox"])
