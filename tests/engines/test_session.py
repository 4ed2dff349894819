"""Sessions of every backend that runs here: in place, guarded, on one pool of threads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from outrider.backends.open import open_bundle, open_engines
from outrider.engines.contract import window_buckets
from outrider.engines.device import Launch
from outrider.engines.session import Pass, Session
from outrider.errors import EngineError
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.tests.support import build

IDS = np.array([[5, 9, 11, 40, 2, 77, 8, 30, 4]], dtype=np.int64)


def at(*positions: int) -> np.ndarray:
    return np.array(positions, dtype=np.int64)


@pytest.fixture(scope="module", params=["onnxruntime", "openvino"])
def bundle(request: pytest.FixtureRequest, tiny_export: Path, once: Callable[..., Path]) -> Path:
    return once(f"tiny-bundle-{request.param}", lambda output: build(tiny_export, output, backend=request.param, batch=2))


@pytest.fixture
def session(bundle: Path) -> Session:
    return open_engines(bundle, *open_bundle(bundle)).session("target", batch=1)


def test_chunks_give_the_logits_of_one_pass(session: Session) -> None:
    whole = session.run(IDS, at(0)).copy()
    pieces = [session.run(IDS[:, a:b], at(a)).copy() for a, b in ((0, 2), (2, 3), (3, 7), (7, 9))]
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), whole, atol=1e-5)


def test_a_smaller_position_takes_back_what_was_written(session: Session) -> None:
    want = session.run(IDS, at(0)).copy()
    session.run(IDS[:, :4], at(0))
    session.run(np.full((1, 5), 99), at(4))  # a rejected draft
    np.testing.assert_allclose(session.run(IDS[:, 4:], at(4)), want[:, 4:], atol=1e-5)


def test_the_cache_is_written_in_place(session: Session) -> None:
    session.run(IDS, at(3))
    assert len(session.cache()) == 4  # keys and values of two layers
    for array in session.cache().values():
        assert (array[:, :, 3:12] != 0).any(axis=-1).all()
        assert (array[:, :, :3] == 0).all()
        assert (array[:, :, 12:] == 0).all()


RUN = """
import sys
from outrider import Outrider, SamplingParams
events = Outrider.load(sys.argv[1]).generate("the quick brown fox", SamplingParams(max_new_tokens=80), k=4)
print(len([token for event in events for token in event.token_ids]))
"""


def test_onnx_runtime_does_not_warn_of_copied_caches(tiny_bundle: Path) -> None:
    done = subprocess.run([sys.executable, "-c", RUN, str(tiny_bundle)], capture_output=True, text=True, check=True)
    assert done.stdout == "80\n"
    assert done.stderr == ""


def test_sequences_of_a_batch_stand_at_positions_of_their_own(bundle: Path) -> None:
    engines = open_engines(bundle, *open_bundle(bundle))
    both, alone = engines.session("target", batch=2), engines.session("target", batch=1)
    other = IDS[:, ::-1].copy()
    both.run(np.concatenate([IDS, other]), at(0, 0))
    ragged = both.run(np.array([[1, 2, 3], [7, 8, 9]]), at(9, 4)).copy()
    alone.run(IDS, at(0))
    np.testing.assert_allclose(ragged[:1], alone.run(np.array([[1, 2, 3]]), at(9)), atol=1e-5)
    alone.run(other, at(0))
    np.testing.assert_allclose(ragged[1:], alone.run(np.array([[7, 8, 9]]), at(4)), atol=1e-5)


@pytest.mark.parametrize(("rows", "position"), [(9, 152), (1, 160), (17, 0), (1, -1)])
def test_a_run_that_does_not_fit_is_refused_before_it_writes(session: Session, rows: int, position: int) -> None:
    session.run(np.full((1, 8), 3), at(152))  # up to the last slot is fine
    before = {name: array.copy() for name, array in session.cache().items()}
    with pytest.raises(EngineError, match="does not fit"):
        session.run(np.zeros((1, rows), dtype=np.int64), at(position))
    for name, array in session.cache().items():
        np.testing.assert_array_equal(array, before[name])


def test_what_only_writes_the_cache_leaves_logits_out(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = open_engines(bundle, *open_bundle(bundle))
    writes, runs = (engines.session("target", batch=1) for _ in range(2))
    bound, bind = list[tuple[int, ...]](), writes.bind

    def noted(buffers: Pass) -> Launch:
        bound.append(buffers.logits.shape)
        return bind(buffers)

    monkeypatch.setattr(writes, "bind", noted)
    writes.write(IDS, at(0))
    assert [shape[1] for shape in bound] == [0]
    want = runs.run(IDS, at(0)).copy()
    for name, array in writes.cache().items():
        np.testing.assert_array_equal(array, runs.cache()[name])
    device = writes.device
    ids, position = device.zeros(IDS.shape, "int64", "ids"), device.zeros((1,), "int64", "position")
    last = device.zeros((1, 2, writes.vocab_rows), "float32", "the last two rows' logits")
    device.write(ids, IDS)
    writes.bind(Pass(ids, position, last, window=64))()
    np.testing.assert_allclose(device.read(last), want[:, -2:], atol=1e-5)


def test_a_copied_beginning_is_continued_as_in_its_own_slot(bundle: Path) -> None:
    session = open_engines(bundle, *open_bundle(bundle)).session("target", batch=2)
    session.write(IDS, at(0), 0)
    session.copy(0, 1, IDS.size)
    own, copied = (session.run(np.array([[1, 2, 3]]), at(IDS.size), slot).copy() for slot in (0, 1))
    np.testing.assert_allclose(copied, own, atol=1e-5)


def test_the_window_holds_the_last_row_of_a_pass(session: Session) -> None:
    """Most kernels take no note of it, but graphs that are not rewritten read no more."""
    assert [session.window(1, place, place) for place in (0, 63, 64, 127, 128, 159)] == [64, 64, 128, 128, 160, 160]
    assert [session.window(5, 3, place) for place in (59, 60)] == [64, 128]


def test_windows_double_up_to_the_capacity() -> None:
    assert window_buckets(512) == [64, 128, 256, 512]
    assert window_buckets(160) == [64, 128, 160]
    assert window_buckets(10) == [10]


def test_an_unknown_backend_is_refused(tiny_bundle: Path) -> None:
    manifest, made = open_bundle(tiny_bundle)
    with pytest.raises(EngineError, match="no backend 'abacus'"):
        open_engines(tiny_bundle, manifest, msgspec.structs.replace(made, backend="abacus"))


@pytest.mark.parametrize(
    "change",
    [
        {"layers": [(2, 8, 8)] * 3},
        {"layers": [(2, 8, 8)]},
        {"layers": [(2, 8, 8), (2, 8, 4)]},
        {"vocab_rows": 384},
        {"precision": "fp16"},
    ],
)
def test_an_engine_that_is_not_what_the_manifest_says_is_refused(tiny_bundle: Path, change: dict[str, Any]) -> None:
    manifest, made = open_bundle(tiny_bundle)
    models = {**manifest.models, "target": msgspec.structs.replace(manifest.models["target"], **change)}
    with pytest.raises(EngineError, match="is not the engine that the manifest describes"):
        open_engines(tiny_bundle, msgspec.structs.replace(manifest, models=models), made).session("target", batch=1)


THREADS = """
import os, sys
from outrider import Outrider, SamplingParams
before = len(os.listdir("/proc/self/task"))
loaded = Outrider.load(sys.argv[1])
list(loaded.generate("the", SamplingParams(max_new_tokens=9)))
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads by /proc; shows that sessions share one pool")
def test_both_sessions_share_one_pool_of_the_requested_size(bundle: Path) -> None:
    def started(threads: int) -> int:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-c", THREADS, str(bundle)]
        return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)

    assert started(threads=2) - started(threads=1) == 1  # two pools would make it 2


def test_time_in_the_engine_is_counted(tiny: Outrider) -> None:
    stats = list(tiny.generate("the quick", SamplingParams(max_new_tokens=30), k=4))[-1].stats
    assert 0 < stats.engine_seconds < stats.seconds - stats.prompt_seconds
    assert 0 < stats.outside_engines < 1
