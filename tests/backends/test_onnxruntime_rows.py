"""ONNX Runtime on the CPU: a row of a quantized target has the same bits alone and among others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from outrider.backends.onnxruntime import engine
from outrider.backends.onnxruntime.lone_rows import LONE_RUNS, lone_rows_vary
from outrider.backends.open import open_bundle, open_engines
from outrider.engines.arrays import Floats, Int64s
from outrider.engines.graph_session import GraphSession
from outrider.export.pair import export_pair
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.tests.support import build, write_checkpoint

SLOTS, BEGIN, CHUNK = 2, 48, 16
TEXT = np.random.default_rng(0).integers(0, 1024, (1, BEGIN + CHUNK))


@pytest.fixture(params=["int4", pytest.param("int8", marks=pytest.mark.slow)])
def session(request: pytest.FixtureRequest, wide_exports: Callable[[str], Path], once: Callable[..., Path]) -> GraphSession:
    export = wide_exports(request.param)
    bundle = once(f"{export.name}-onnxruntime", lambda output: build(export, output, batch=SLOTS, k=[1]))
    made = open_engines(bundle, *open_bundle(bundle)).session("target", SLOTS)
    assert isinstance(made, GraphSession)
    assert all((cache == 0).all() for cache in made.cache().values())  # what was compared when it was loaded is gone
    return made


@pytest.mark.parametrize("paired", [False, True], ids=["as this processor needs", "paired"])
def test_rows_have_the_same_bits(session: GraphSession, paired: bool) -> None:
    if paired:  # on every processor, so that this path is tested on all
        session.pair_lone_rows()
    for at in range(0, BEGIN, CHUNK):
        session.write(TEXT[:, at : at + CHUNK], np.array([at]), 1)
    want = session.run(TEXT[:, BEGIN:], np.array([BEGIN]), 1)[0].copy()
    for count in (1, 2, 3, 4, 5, 9):
        got = session.run(TEXT[:, BEGIN : BEGIN + count], np.array([BEGIN]), 1)[0]
        np.testing.assert_array_equal(got, want[:count])
    for row in range(CHUNK):
        at = BEGIN + row
        np.testing.assert_array_equal(session.run(TEXT[:, at : at + 1], np.array([at]), 1)[0, 0], want[row])


def test_the_last_position_of_a_slot_is_its_own(session: GraphSession) -> None:
    """A row that keeps another company must not be written into the next slot."""
    session.pair_lone_rows()
    session.write(TEXT[:, :8], np.array([0]), 1)
    before = {name: cache.copy() for name, cache in session.cache().items()}
    session.write(TEXT[:, :1], np.array([session.capacity - 1]), 0)
    for name, cache in session.cache().items():
        np.testing.assert_array_equal(cache[1], before[name][1])
        assert (cache[0, :, session.capacity - 1] != 0).any()


def test_rows_that_vary_are_found(session: GraphSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU they are equal; on a GPU, a row's product may add up in any order."""
    assert not lone_rows_vary(session)
    run, runs = session.run, itertools.count(1)

    def noisy(ids: Int64s, positions: Int64s) -> Floats:
        logits = run(ids, positions)
        return np.nextafter(logits, np.float32(np.inf)) if next(runs) == LONE_RUNS else logits

    monkeypatch.setattr(session, "run", noisy)
    assert lone_rows_vary(session)


def test_texts_are_those_of_plain_decoding_up_to_the_last_position(
    trained_bundles: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where lone rows are paired, as on a processor that needs it."""
    monkeypatch.setattr(engine, "lone_rows_differ", lambda _: True)
    outrider = Outrider.load(trained_bundles("int4", batch=SLOTS, k=[1, 4]))
    params, texts = SamplingParams(max_new_tokens=1000), []
    for options in ({"k": 0}, {"k": 1}, {"k": 4}, {"k": 4, "drafter": "ngram"}, {"k": "auto"}):
        events = list(outrider.generate("The old man walked along the road, and", params, **options))
        texts.append([token for event in events for token in event.token_ids])
    assert all(text == texts[0] for text in texts)


def test_a_table_of_positions_has_one_for_a_row_that_is_run_along(tmp_path: Path) -> None:
    """GPT-2 looks positions up, and a row behind the last one has none."""
    config = GPT2Config(n_embd=64, n_head=4, n_layer=1, n_positions=64, vocab_size=320, bos_token_id=None, eos_token_id=0)
    made = write_checkpoint(tmp_path / "gpt2", GPT2LMHeadModel(config).eval())
    export_pair(str(made), None, tmp_path / "onnx", precision="int8")
    bundle = build(tmp_path / "onnx", tmp_path / "bundle", k=[1], capacity=64)
    session = open_engines(bundle, *open_bundle(bundle)).session("target", 1)
    assert isinstance(session, GraphSession)
    session.pair_lone_rows()
    assert np.isfinite(session.run(np.array([[5]]), np.array([63]))).all()
