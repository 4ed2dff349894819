"""Runs a step model whole and in stages, and compares all that they compute."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.testing
import onnx_ir as ir
import onnxruntime

from outrider.backends.onnxruntime.pool import session_options
from outrider.backends.rewriting.stages import cut, possible_ends
from outrider.engines.contract import (
    BATCH_DIM,
    BOUNDARY,
    CAPACITY_DIM,
    COMMITTED,
    INPUT_IDS,
    KEY_POSITIONS,
    PENDING,
    POSITIONS,
    RECENT_DIM,
)

PROMPT = (7, 1)  # rows of each run that reads the prompt
ROUNDS = ((5, 3), (4, 1), (1, 1), (3, 3))  # of each round after it: its rows, and how many of them stay
SIZES = {BATCH_DIM: 2, CAPACITY_DIM: 32, RECENT_DIM: 12}
START = np.array([0, 3])  # the second sequence follows a text that was all zeros
ARRAYS = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
Values = dict[str, Any]


def check_stages(
    graph: Path, folder: Path, cuts: Iterable[Sequence[int]] = (), compare: Callable[[Any, Any], None] | None = None
) -> list[list[ir.Model]]:
    """Check that stages compute what the whole does, bit for bit unless `compare` compares them, and return them.

    Args:
        graph: the whole, with its weights beside it.
        folder: where copies and stages are written.
        cuts: where the stages end; by default, once after each possible number of layers, and after all of them together.
    """
    for file in graph.parent.glob(f"{graph.name}*"):
        shutil.copy(file, folder)
    model = ir.load(folder / graph.name)
    if not cuts:
        *before, last = possible_ends(model)
        cuts = [*([end, last] for end in before), [*before, last]]
    whole = _session(folder / graph.name)
    want = _results([whole], whole)
    made = []
    for ends in cuts:
        stages = cut(model, ends)
        paths = [folder / f"stage-{index}.onnx" for index in range(len(stages))]
        for stage, path in zip(stages, paths, strict=True):
            ir.save(stage, path)
        sessions = [_session(path) for path in paths]
        for before, after in pairwise(sessions):
            passed = {each.name for each in before.get_outputs() if each.name.startswith(BOUNDARY)}
            assert passed == {each.name for each in after.get_inputs() if each.name.startswith(BOUNDARY)} != set()
        for run, (whole_run, staged) in enumerate(zip(want, _results(sessions, whole), strict=True)):
            for name, value in whole_run.items():
                (compare or numpy.testing.assert_array_equal)(staged[name], value)
                assert np.isfinite(value).all(), (ends, run, name)
        made.append(stages)
    return made


def _session(path: Path) -> Any:
    options = session_options()
    options.log_severity_level = 3  # it warns that it copies caches
    return onnxruntime.InferenceSession(path, options)


def _results(sessions: Sequence[Any], whole: Any) -> list[Values]:
    """Return the outputs of each run by name. Each session has caches of its own, and reads what the others pass to it."""
    caches = [_empty(each) for each in sessions]
    at, pending, found, random = START, 0, list[Values](), np.random.default_rng(0)
    vocabulary = 64
    for rows, stay in (*((rows, rows) for rows in PROMPT), *ROUNDS):
        is_prompt = len(found) < len(PROMPT)
        committed = rows if is_prompt else pending + 1
        given: Values = {
            INPUT_IDS: random.integers(1, vocabulary, (len(START), rows)),
            POSITIONS: at,
            KEY_POSITIONS: np.arange(SIZES[CAPACITY_DIM]),
            PENDING: np.full(len(START), pending),
            COMMITTED: np.full(len(START), committed),
        }
        outputs: Values = {}
        for session, cache in zip(sessions, caches, strict=True):
            own = _run(session, given | cache)
            cache |= {name.replace("present_", "past_"): value for name, value in own.items() if name.startswith("present_")}
            given |= {name: value for name, value in own.items() if name.startswith(BOUNDARY)}
            assert not outputs.keys() & own.keys()
            outputs |= own
        found.append({each.name: outputs[each.name] for each in whole.get_outputs()})
        at, pending = at + stay, 0 if is_prompt else stay - 1
    return found


def _empty(session: Any) -> Values:
    return {
        each.name: np.zeros([SIZES.get(size, size) for size in each.shape], ARRAYS[each.type])
        for each in session.get_inputs()
        if each.name.startswith("past_")
    }


def _run(session: Any, given: Mapping[str, Any]) -> Values:
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(names, {each.name: given[each.name] for each in session.get_inputs()}), strict=True))
