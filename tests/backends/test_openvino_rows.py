"""Rows on OpenVINO: their bits do not depend on what runs beside them, and each is written to its own place in its slot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import openvino as ov
import pytest

import outrider.backends.openvino.session as paged
from outrider.bundle.folder import read_manifest
from outrider.engines.arrays import Floats
from outrider.engines.session import Pass, Session
from outrider.errors import OutriderWarning
from outrider.export.pair import export_pair
from outrider.tests.backends.openvino_slots import PRECISIONS, SLOTS, TEXT, rows, target
from outrider.tests.support import build, llama, write_checkpoint


@pytest.fixture(scope="module", params=PRECISIONS)
def wide(request: pytest.FixtureRequest, wide_exports: Callable[[str], Path], once: Callable[..., Path]) -> Path:
    """A bundle whose matrices are as large as those of the shipped target."""
    made = wide_exports(request.param)
    return once(f"{made.name}-openvino", lambda output: build(made, output, backend="openvino", batch=SLOTS, k=[1]))


def test_a_row_has_the_same_bits_whatever_runs_beside_it(wide: Path) -> None:
    precision = read_manifest(wide).models["target"].precision
    if precision == "bf16" and "BF16" not in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        # It is computed in fp32 then, and rounded to bf16 in between, which may turn a last bit into a step of bf16.
        check_bits(target(wide), lambda got, want: np.testing.assert_allclose(got, want, atol=0.1))
    else:
        check_bits(target(wide))


@pytest.mark.parametrize("group_size", [pytest.param(64, marks=pytest.mark.slow), 128])
def test_a_row_has_the_same_bits_with_larger_groups(group_size: int, tmp_path: Path) -> None:
    model = llama(vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=1)
    target_of = write_checkpoint(tmp_path / "model", model)
    export_pair(str(target_of), None, tmp_path / "onnx", precision="int4", group_size=group_size)
    bundle = build(tmp_path / "onnx", tmp_path / "bundle", backend="openvino", batch=SLOTS)
    check_bits(target(bundle))
    with pytest.warns(OutriderWarning, match=f"with groups of {group_size}, ONNX Runtime's last bits depend"):
        build(tmp_path / "onnx", tmp_path / "other")


def check_bits(session: Session, same: Callable[[Floats, Floats], None] = np.testing.assert_array_equal) -> None:
    """Compare rows alone, among 2 to 16, in one sequence of several, in every slot, and with all or only the last logits."""
    for slot in range(SLOTS):
        for at in range(0, 100, 10):  # in prompts' chunks, whose rows are compared, too
            session.write(TEXT[:, at : at + 10], np.array([at]), slot)
    want = rows(session, 100, 116, np.array([0]))[0]
    for count in (1, 2, 3, 4, 5, 9, 16):
        for slots in (np.array([2]), np.array([0, 1]), np.array([1, 2]), np.arange(SLOTS)):
            for got in rows(session, 100, 100 + count, slots):
                same(got, want[:count])
    one = np.concatenate([rows(session, at, at + 1, np.array([1]))[0] for at in range(100, 116)])
    same(one, want)
    ragged = session.run(TEXT[:, [[103, 104, 105], [100, 101, 102]]][0], np.array([103, 100]), 0)
    same(np.concatenate([ragged[1], ragged[0]]), want[:6])
    device = session.device
    for answered in (0, 1, 2):
        last = device.zeros((1, answered, session.vocab_rows), "float32", "some logits")
        ids, position = device.zeros((1, 5), "int64", "ids"), device.zeros((1,), "int64", "position")
        device.write(ids, TEXT[:, 100:105])
        device.write(position, np.array([100]))
        session.bind(Pass(ids, position, last, window=128))()
        same(device.read(last)[0], want[5 - answered : 5])


def test_a_pass_runs_only_the_rows_that_its_sequences_need(wide: Path) -> None:
    """Their bits are those of other passes, in the logits and in the caches."""
    session, places, most = target(wide), np.array([7, 10, 12]), 4
    for slot in range(SLOTS):
        session.write(TEXT[:, :16], np.array([0]), slot)
    want = [rows(session, at, at + most, np.array([slot]))[0] for slot, at in enumerate(places)]
    written = session.cache()
    device = session.device
    ids, starts, needed = (device.zeros(shape, "int64", "a pass") for shape in ((SLOTS, most), (SLOTS,), (SLOTS,)))
    logits = device.zeros((SLOTS, most, session.vocab_rows), "float32", "a pass")
    device.write(ids, np.concatenate([TEXT[:, at : at + most] for at in places]))
    device.write(starts, places)
    launch = session.bind(Pass(ids, starts, logits, window=64, drafted=needed))
    tolerance = 0.1 if read_manifest(wide).models["target"].precision == "bf16" else 0
    for drafted in ([3, 3, 3], [0, 0, 0], [2, 0, 1], [0, 3, 0], [1, 0, 3], [0, 0, 2], [2, 0, 1]):
        session.write(np.zeros((SLOTS, most), np.int64), places)
        device.write(needed, np.array(drafted))
        launch()
        for slot, (at, count) in enumerate(zip(places, drafted, strict=True)):
            got = device.read(logits)[slot, : count + 1]
            np.testing.assert_allclose(got, want[slot][: count + 1], rtol=0, atol=tolerance)
            end = at + max(count + 1, 2)  # attention gives a single row a second one
            for name, cache in session.cache().items():
                np.testing.assert_allclose(
                    cache[slot, :, : at + count + 1], written[name][slot, :, : at + count + 1], atol=tolerance
                )
                assert (cache[slot, :, end : at + most] != written[name][slot, :, end : at + most]).any((0, 2)).all()


def test_the_last_position_of_a_slot_is_its_own(wide: Path) -> None:
    """A single row is joined by a second one, which must not be written into the next slot."""
    session = target(wide)
    last = session.capacity - 1
    for slot in range(SLOTS):
        session.write(TEXT[:, :8], np.array([0]), slot)
    before = {name: cache.copy() for name, cache in session.cache().items()}
    session.write(TEXT[:, :1], np.array([last]), 0)
    session.write(np.repeat(TEXT[:, :1], 2, 0), np.array([last, 20]), 0)
    for name, cache in session.cache().items():
        np.testing.assert_array_equal(cache[2], before[name][2])
        np.testing.assert_array_equal(cache[1, :, :20], before[name][1, :, :20])
        assert (cache[1, :, 22:] == 0).all()
        assert (cache[0, :, last] != 0).any()


def test_rows_alone_would_have_other_bits(trained_bundles: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: OpenVINO's kernels for a single row add in another order."""
    bundle = trained_bundles("int4", backend="openvino", batch=SLOTS, k=[1, 4])
    differences = []
    for fewest in (2, 1):
        monkeypatch.setattr(paged, "FEWEST", fewest)
        session = target(bundle)
        session.write(TEXT[:, :16], np.array([0]))
        among = rows(session, 16, 20, np.array([0]))[0]
        alone = np.concatenate([rows(session, at, at + 1, np.array([0]))[0] for at in range(16, 20)])
        differences.append(float(np.abs(among - alone).max()))
    assert differences[0] == 0 < differences[1]
