"""Costs that are fitted: exact where passes take what the model of costs says, and never absurd where noise does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.builder.fitting import Place, complete
from outrider.builder.passes import all_passes, few_passes
from outrider.bundle.manifest import Build, Cost
from outrider.engines.contract import window_buckets


def sizes(k: list[int], capacity: int, batch: int, chunk: int = 64) -> Build:
    known: dict[str, Any] = {"backend": "", "backend_version": "", "device": "", "windows": window_buckets(capacity)}
    return Build(k=k, capacity=capacity, batch=batch, max_prompt_chunk=chunk, **known)


def timed(place: Place, time: float) -> Cost:
    rows, window, batch = place
    return Cost(rows=rows, window=window, batch=batch, median=time, fastest=time / 2, slowest=2 * time, runs=3)


def machine(rows: int, window: int, batch: int) -> float:
    """Milliseconds, in steps by rows; what sequences and positions add grows with rows, and positions add more in a batch."""
    of_window = window * (0.001 + 0.0005 * rows) * (1 + 0.75 * (batch - 1))
    return 30 + rows // 4 * 7 + (batch - 1) * (2 + 0.25 * rows) + of_window


def test_a_build_times_few_passes() -> None:
    """One row and k + 1, one chunk, two windows, one sequence and the largest batch."""
    build = sizes([1, 2, 4, 8], 4096, 4)
    edges = {(rows, window, batch) for rows in (1, 9) for window in (64, 4096) for batch in (1, 4)}
    assert {each[1:] for each in few_passes("target", build)} == edges | {(rows, 64, 1) for rows in (2, 3, 5, 64)}
    assert {each[1:] for each in few_passes("verifier", build)} == {(r, 0, 1) for r in (1, 2, 3, 5, 9)} | {(1, 0, 4), (9, 0, 4)}
    assert {each[1:] for each in few_passes("draft_sampler", build)} == {(1, 0, 1), (1, 0, 4)}
    assert [each[3] for each in all_passes("target", build)] == [4] * 37 + [2] * 37 + [1] * 37


@pytest.mark.parametrize(
    ("k", "capacity", "batch", "chunk"), [([1, 2, 4, 8], 4096, 4, 64), ([1], 64, 1, 16), ([3], 500, 6, 32), ([2], 300, 1, 8)]
)
def test_a_machine_that_is_as_the_model_says_is_fitted_exactly(k: list[int], capacity: int, batch: int, chunk: int) -> None:
    build = sizes(k, capacity, batch, chunk)
    for name in ("target", "parallel-draft", "verifier", "draft_sampler"):
        few = [timed(each[1:], machine(*each[1:])) for each in few_passes(name, build)]
        wanted = [each[1:] for each in all_passes(name, build)]
        costs = complete(few, wanted)
        assert [(cost.rows, cost.window, cost.batch) for cost in costs] == wanted
        assert [cost for cost in costs if cost.runs] == [cost for cost in costs if cost in few]
        for cost in costs:
            assert cost.median == pytest.approx(machine(cost.rows, cost.window, cost.batch), abs=2e-4)


@given(st.data())
@pytest.mark.parametrize("k", [[1, 4], [1, 100]])  # 101 rows do not fit into the first window
def test_no_noise_makes_a_longer_pass_take_less_time(k: list[int], data: st.DataObject) -> None:
    build = sizes(k, 256, 4)
    few = [timed(each[1:], data.draw(st.floats(0.001, 1000))) for each in few_passes("target", build)]
    fitted = [cost for cost in complete(few, [each[1:] for each in all_passes("target", build)]) if not cost.runs]
    first = {cost.rows: cost.median for cost in few if (cost.batch, cost.window) == (1, 64 if cost.rows <= 64 else 128)}
    for one in fitted:
        assert one.fastest == one.median == one.slowest >= round(first[one.rows], 4)
        for other in fitted:
            if one.rows == other.rows and one.window <= other.window and one.batch <= other.batch:
                assert one.median <= other.median
