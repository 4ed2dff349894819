"""The child process of `prompts`: it renders chat templates, tokenizes and tries grammars, and a time limit ends it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from tokenizers import Tokenizer

from outrider.errors import UsageError
from outrider.runtime.chat_template import ChatTemplate
from outrider.runtime.grammar import Grammars, rehearse
from outrider.runtime.structured import StructuredOutputs
from outrider.runtime.text import PromptTooLongError, Text
from outrider.serve.arguments import arguments_of

TEMPLATE_SECONDS = 5.0  # for small conversations in the template
JOB_SECONDS = 10.0  # for the prompts of one request
GRAMMAR_SECONDS = 2.0  # for its grammar
REHEARSED = 32  # tokens into a grammar whose masks are tried
TIME_LIMIT = getattr(signal, "SIGALRM", signal.SIGTERM)  # what ends the child at a limit; Windows has no such timers
MEMORY = 4 << 30  # bytes of address space
# Deep grammars overflow the stack, and the server compiles again, on threads with two megabytes or more: what ends no child
# must not end the server.
GRAMMAR_STACK = 1 << 20
NICE = 5  # the engines come first


class Source(msgspec.Struct):
    """A bundle's tokenizer and chat template, and what grammars need to know."""

    tokenizer: str  # in JSON
    template: str | None
    special_tokens: dict[str, str]
    vocab_rows: int
    end_ids: list[int]


class Job(msgspec.Struct):
    """The prompts of one request: texts, or else the messages of a chat; or else the grammar of its answers, to be tried."""

    limit: int = 0  # tokens of each
    texts: Sequence[str] = ()
    messages: Sequence[dict[str, Any]] = ()  # the arguments of tool calls are text, as a client sends them
    tools: Sequence[dict[str, Any]] = ()
    allow_special_tokens: bool = False
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    template_kwargs: dict[str, Any] = {}
    structured: dict[str, Any] = {}  # the arguments of `StructuredOutputs`


class Reply(msgspec.Struct):
    """The prompts' token ids, or the `UsageError`."""

    tokens: list[list[int]] = []
    error: str = ""
    hint: str = ""
    param: str | None = None
    too_long: bool = False


def main() -> None:
    """Read the source, then answer jobs until standard input ends. Each is a line of JSON, and so is each reply."""
    for number in {
        signal.SIGINT,
        signal.SIGTERM,
        getattr(signal, "SIGHUP", signal.SIGTERM),
    }:  # the parent may receive them, too, and lets requests finish
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        import resource

        os.nice(NICE)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    lines, replies = sys.stdin.buffer, sys.stdout.buffer
    source = msgspec.json.decode(lines.readline(), type=Source)
    template = None if source.template is None else ChatTemplate(source.template, source.special_tokens)
    text = Text(Tokenizer.from_str(source.tokenizer), template)
    grammars = Grammars(text.tokenizer, source.vocab_rows, source.end_ids)
    if template is not None:
        _limit(TEMPLATE_SECONDS)
        template.samples()
        _limit(0)
    replies.write(b"\n")
    replies.flush()
    threading.stack_size(GRAMMAR_STACK)
    compiling = ThreadPoolExecutor(1)
    while line := lines.readline():
        job = msgspec.json.decode(line, type=Job)
        if job.structured and source.end_ids:
            grammars.tokenizer  # noqa: B018  # what it takes to make it the first time is not the request's
        _limit(GRAMMAR_SECONDS if job.structured else JOB_SECONDS)
        reply = compiling.submit(_grammar_reply, grammars, job.structured).result() if job.structured else _reply(text, job)
        _limit(0)
        replies.write(msgspec.json.encode(reply) + b"\n")
        replies.flush()


def _limit(seconds: float) -> None:
    """End this process after so many seconds; 0 lifts the limit. The system does it, so nothing that runs can prevent it."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _grammar_reply(grammars: Grammars, structured: dict[str, Any]) -> Reply:
    try:
        rehearse(grammars.compile(StructuredOutputs(**structured)).matcher, REHEARSED)
    except UsageError as error:
        return Reply([], str(error), error.hint, error.param)
    return Reply()


def _reply(text: Text, job: Job) -> Reply:
    limit = job.limit
    try:
        if job.messages:
            prompts = [
                text.encode_chat(
                    [*map(_with_arguments, job.messages)],
                    job.tools,
                    limit=limit,
                    allow_special_tokens=job.allow_special_tokens,
                    add_generation_prompt=job.add_generation_prompt,
                    template_kwargs=job.template_kwargs,
                )
            ]
        else:
            add = job.add_special_tokens
            prompts = [text.encode(each, chat=False, limit=limit, add_special_tokens=add) for each in job.texts]
        if (longest := max(map(len, prompts))) > limit:  # they are not sent only to be refused
            raise PromptTooLongError(f"the prompt has {longest:,} tokens; this server's limit is {limit:,}", "shorten it")
    except UsageError as error:
        return Reply([], str(error), error.hint, error.param, isinstance(error, PromptTooLongError))
    except RecursionError:
        return Reply([], "the messages and tools have too many lists and objects within each other", "make them flat", "chat")
    return Reply(prompts)


def _with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the arguments of its tool calls as values, as templates expect them."""
    calls = [
        call | {"function": call["function"] | {"arguments": arguments_of(call)}} for call in message.get("tool_calls", ())
    ]
    return message | {"tool_calls": calls} if calls else message


if __name__ == "__main__":
    main()
