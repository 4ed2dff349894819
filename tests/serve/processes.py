"""The processes that serve prompts and masks, as the tests of workers watch, end and await them."""

from __future__ import annotations

import time
from contextlib import suppress

import psutil

from outrider.runtime.grammar.matcher import Matcher
from outrider.serve.workers.workers import Workers
from outrider.tests.support import tokenizer


def end(workers: Workers) -> None:
    while left := children(workers):
        for child in left:
            with suppress(psutil.NoSuchProcess):  # it may end by a limit
                child.kill()
        time.sleep(0.01)


def children(workers: Workers) -> list[psutil.Process]:
    assert workers.process is not None
    return list(psutil.Process(workers.process.pid).children(recursive=True))


def only(workers: Workers) -> psutil.Process:
    """Wait until there is one worker."""
    while len(left := children(workers)) > 1:
        time.sleep(0.01)
    return left[0]


def wait(matcher: Matcher) -> Matcher:
    deadline = time.monotonic() + 60
    while not matcher.ready():
        assert time.monotonic() < deadline
    return matcher


def ids(text: str) -> list[int]:
    return list(tokenizer().encode(text).ids)
