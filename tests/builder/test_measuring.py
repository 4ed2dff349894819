"""What is measured of passes and of drafters: with a clock and with answers that a test has made."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.builder import acceptance as acceptance_module
from outrider.builder.acceptance import ANSWER_TOKENS, measure_acceptance
from outrider.builder.passes import PassKey, Stopwatch, Timed
from outrider.builder.workloads import Prompt
from outrider.runtime.drafters.base import DeviceDrafter


class Machine:
    """Passes that each take the next of some milliseconds, on a clock that nothing else moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._now = 0.0
        self.ran: list[str] = []
        monkeypatch.setattr(time, "perf_counter", lambda: self._now)

    def timed(self, name: str, milliseconds: list[float], passes: int = 1) -> Timed:
        left = [*milliseconds]

        def run() -> None:
            self.ran.append(name)
            self._now += left.pop(0) / 1000

        return Timed(run, passes)


def test_the_median_counts_and_no_first_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    passes: dict[PassKey, Timed] = {
        ("target", 1, 64, 1): machine.timed("a", [1000, 900, 3, 7, 4, 5, 20]),  # the first makes buffers, the next the shape
        ("target", 5, 64, 1): machine.timed("b", [1000, 900, 16, 800, 8, 700, 8, 600, 8, 500, 8], passes=2),
        ("target", 5, 128, 1): machine.timed("c", [1000, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]),
        ("draft", 1, 64, 1): machine.timed("d", [1000, 900, 1, 1, 1, 1, 1]),
    }
    stopwatch = Stopwatch(passes)
    assert machine.ran == ["a", "b", "c", "d"]
    stopwatch.run(5, lambda each: each[1] == 1)
    stopwatch.run(2, lambda each: each[1] == 5)
    costs = stopwatch.costs()
    first, second, third = costs["target"]
    assert (first.rows, first.window, first.batch, first.runs) == (1, 64, 1, 5)
    assert (first.median, first.fastest, first.slowest) == (5, 3, 20)
    assert (second.runs, second.fastest, second.slowest) == (2, 8, 400)  # another window came between, of the same shape
    assert (third.window, third.runs, third.median) == (128, 2, 2)
    assert [(each.rows, each.median, each.runs) for each in costs["draft"]] == [(1, 1, 5)]


def test_a_long_pass_is_timed_without_another_run_before(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    long, short = machine.timed("long", [151, 120]), machine.timed("short", [149, 900, 3])
    stopwatch = Stopwatch({("target", 64, 64, 1): long, ("target", 1, 64, 1): short}, 150)
    stopwatch.run()
    assert machine.ran == ["long", "short", "long", "short", "short"]
    assert [each.median for each in stopwatch.costs()["target"]] == [120, 3]


def drafter(*answers: list[bool]) -> Any:
    """A drafter that would have proposed these of the tokens of each answer."""
    left = [*answers]

    class Agreeing(DeviceDrafter):
        def agreement(self, prompt: list[int], tokens: list[int]) -> tuple[list[bool], list[float]]:
            agrees = left.pop(0)
            assert len(tokens) == len(agrees)
            return agrees, [1.0] * len(agrees)

    concrete: Any = Agreeing
    concrete.__abstractmethods__ = frozenset()
    return object.__new__(concrete)


def test_acceptance_is_the_share_of_the_targets_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    half, none = [True, False] * (ANSWER_TOKENS // 2), [False] * ANSWER_TOKENS
    drafters = {"model": drafter(half, none), "head": drafter(none, none), "ngram": object()}
    asked: list[tuple[list[int], int, int]] = []

    def generate(ids: list[int], params: Any, k: int) -> list[Any]:
        asked.append((ids, params.max_new_tokens, k))
        return [SimpleNamespace(token_ids=(5,)) for _ in range(params.max_new_tokens)]

    prompts = [Prompt("chat", "short"), Prompt("code", "x" * 100), Prompt("math", "other")]
    monkeypatch.setattr(acceptance_module, "load", lambda *_, **__: prompts)
    loaded: Any = SimpleNamespace(
        decoder=SimpleNamespace(drafters=drafters),
        text=SimpleNamespace(encode=lambda prompt, chat: [1] * len(prompt)),
        build=SimpleNamespace(capacity=60),
        manifest=SimpleNamespace(files={}),
        generate=generate,
    )
    assert measure_acceptance(loaded) == {"model": 0.25, "head": 0.0}
    assert asked == [([1] * 5, ANSWER_TOKENS, 0)] * 2  # plain decoding, where an answer fits
    drafters |= {name: drafter(half[::2], half[: ANSWER_TOKENS // 2]) for name in ("model", "head")}
    prompts[1] = Prompt("code", "def f")
    assert measure_acceptance(loaded, few=True) == {"model": 0.75, "head": 0.75}
    assert asked[2:] == [([1] * 5, ANSWER_TOKENS // 2, 0)] * 2  # chat and code, not math
    loaded.build.capacity = 20
    assert measure_acceptance(loaded) == {}
