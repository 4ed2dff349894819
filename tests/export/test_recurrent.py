"""Recurrent layers end in the state of the accepted text, whatever was drafted and rejected on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers as hf

from outrider.backends.onnxruntime.engine import OnnxRuntimeEngine
from outrider.backends.onnxruntime.fusion.fuse import fuse
from outrider.backends.rewriting.graphs import load
from outrider.engines.contract import recent_rows, step_tensors, window_buckets
from outrider.engines.device import Cpu
from outrider.engines.graph_session import GraphSession
from outrider.engines.sizes import Sizes
from outrider.errors import EngineError, UnsupportedModelError
from outrider.export.checkpoints.checkpoint import load_model
from outrider.export.checkpoints.source import Source
from outrider.export.graph.cache_layers import CacheLayout
from outrider.export.parity import reference
from outrider.tests.export.recurrent_models import COMMON, CONFIGS

CAPACITY, K, SLOTS, CHUNK, ROUNDS = 96, 4, 2, 9, 100
TOLERANCE = 2e-5


class Traced(NamedTuple):
    graph: Path
    layout: CacheLayout
    model: hf.PreTrainedModel


# Convolutions and Mamba-2; test_architectures.py reads their graphs, too. tests/runtime/hybrid/ has gated delta nets.
FEW = ("LFM2", "Falcon-H1")


@pytest.fixture(
    scope="module", params=[each if each in FEW else pytest.param(each, marks=pytest.mark.slow) for each in CONFIGS]
)
def traced(request: pytest.FixtureRequest, graphs_of: Callable[[str, Any], Path]) -> Traced:
    folder = graphs_of(request.param, CONFIGS[request.param])
    model = load_model(Source.parse(str(folder / "model")), "fp32")
    layout = reference(model, torch.randint(1, 320, (1, 20))).layout
    model.set_attn_implementation("eager")  # to compare with
    return Traced(folder / "fp32.onnx", layout, model)


def open_session(graph: Path, layout: CacheLayout, overwrites: bool = True) -> GraphSession:
    sizes = Sizes(
        layout.layers,
        320,
        CAPACITY,
        window_buckets(CAPACITY),
        CHUNK,
        SLOTS,
        recurrent=layout.recurrent,
        recent=recent_rows(layout.recurrent, K),
    )
    inputs, outputs = step_tensors(layout.layers, 320, "fp32", recurrent=layout.recurrent)
    engine = OnnxRuntimeEngine(graph, [*inputs, *outputs], Cpu(), batch=SLOTS)
    engine.overwrites = overwrites
    return GraphSession(Cpu(), engine, "fp32", sizes)


def states(session: GraphSession, slot: int) -> dict[str, Any]:
    """The states of a slot with nothing kept behind them."""
    return {name: array[slot] for name, array in session.cache().items() if name.startswith("past_state")}


def read(session: GraphSession, tokens: list[int], slot: int, at: int = 0) -> None:
    for begin in range(at, len(tokens), CHUNK):
        session.write(np.array([tokens[begin : min(begin + CHUNK, len(tokens))]]), np.array([begin]), slot)


@pytest.mark.parametrize(
    ("fused", "overwrites"), [(False, True), (True, True), pytest.param(True, False, marks=pytest.mark.slow)]
)
def test_rounds_end_in_the_state_of_a_fresh_prefill(traced: Traced, fused: bool, overwrites: bool, tmp_path: Path) -> None:
    """Of the graph as it is exported and as it is fused, and of engines that may not write a state over the one they read."""
    graph, counts = traced.graph, dict[str, int]()
    if fused:
        graph = tmp_path / "fused.onnx"
        counts, _ = fuse(load(traced.graph), graph, CAPACITY, False, SLOTS)
        stateful = [layer for layer in traced.layout.recurrent if layer.row]
        assert counts.get("recurrences", 0) == len(stateful)
    session = open_session(graph, traced.layout, overwrites=overwrites)
    random = np.random.default_rng(0)
    texts: list[list[int]] = [[], []]
    rounds = 0
    while rounds < ROUNDS:
        for slot in range(SLOTS):  # a text that is full is followed by another
            if not texts[slot] or len(texts[slot]) + K + 1 > CAPACITY:
                if texts[slot]:
                    check(traced, session, texts[slot], slot)
                texts[slot] = random.integers(1, 320, random.integers(2, 30)).tolist()
                read(session, texts[slot][:-1], slot)
        rows = int(random.integers(1, K + 2))
        part = [1, 1] if random.random() < 0.7 else random.permutation([1, 0]).tolist()  # a slot may take no part
        ids = random.integers(1, 320, (SLOTS, rows))
        ids[:, 0] = [text[-1] for text in texts]
        session.run(ids, np.array([len(text) - 1 for text in texts]), 0, certain=part)
        for slot in range(SLOTS):
            if part[slot]:
                accepted = int(random.integers(0, rows))
                texts[slot] += [*ids[slot, 1 : 1 + accepted].tolist(), int(random.integers(1, 320))]
        rounds += 1
    for slot in range(SLOTS):
        check(traced, session, texts[slot], slot)


def check(traced: Traced, session: GraphSession, text: list[int], slot: int) -> None:
    """Compare a slot with the text's fresh prefill, and the logits of its last token with eager transformers'."""
    at = len(text) - 1
    assert session.usable(slot, at) == at
    logits = session.run(np.array([text[-1:]]), np.array([at]), slot)[0, 0].copy()
    with torch.no_grad():
        want = traced.model(torch.tensor([text])).logits[0, -1].numpy()
    np.testing.assert_allclose(logits, want, atol=1e-4)
    before = {name: array.copy() for name, array in states(session, slot).items()}
    read(session, text, slot)
    for name, array in states(session, slot).items():
        np.testing.assert_allclose(before[name], array, atol=TOLERANCE, err_msg=name)


def test_states_do_not_depend_on_the_chunks(traced: Traced, tmp_path: Path) -> None:
    """Within what a product of fp32 rounds otherwise in a lone row; tests/runtime/hybrid/ has texts at 4 and 8 bits."""
    fuse(load(traced.graph), tmp_path / "fused.onnx", CAPACITY, False, SLOTS)
    session = open_session(tmp_path / "fused.onnx", traced.layout)
    text = np.random.default_rng(1).integers(1, 320, 24).tolist()
    ends = []
    for chunks in ((24,), (2, 3, 5, 2, 4, 8), (8, 8, 8)):
        at = 0
        for rows in chunks:
            for begin in range(at, at + rows, CHUNK):
                part = text[begin : min(begin + CHUNK, at + rows)]
                session.write(np.array([part]), np.array([begin]), 0)
            at += rows
        ends.append({name: array.copy() for name, array in states(session, 0).items()})
    for other in ends[1:]:
        for name, array in ends[0].items():
            np.testing.assert_allclose(array, other[name], atol=1e-6, err_msg=name)


def test_a_state_that_is_gone_is_an_error_and_no_wrong_token(traced: Traced) -> None:
    session = open_session(traced.graph, traced.layout)
    read(session, [*range(1, 21)], 0)
    assert session.usable(0, 20) == 20
    assert session.usable(0, 12) == 0
    with pytest.raises(EngineError, match="state before position 12 of slot 0 is gone"):
        session.run(np.array([[5]]), np.array([12]), 0)
    session.run(np.array([[5, 6, 7]]), np.array([20]), 0, certain=[1])
    assert [session.usable(0, at) for at in range(20, 25)] == [0, 21, 22, 23, 0]
    session.copy(0, 1, 23)
    assert session.usable(1, 22) == 22
    session.run(np.array([[5]]), np.array([0]), 0)  # another text begins
    assert session.usable(0, 1) == 1


def test_one_state_a_layer_is_kept(traced: Traced) -> None:
    session = open_session(traced.graph, traced.layout)
    cache = session.cache()
    for index, layer in enumerate(traced.layout.recurrent):
        assert cache[f"past_conv_{index}"].shape == (SLOTS, recent_rows(traced.layout.recurrent, K), layer.channels)
        if layer.row:
            assert cache[f"past_state_{index}"].shape == (SLOTS, layer.heads, layer.key_width, layer.value_width)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (hf.MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=1), "no layer with attention"),
        (hf.JambaConfig(**{**COMMON, "num_hidden_layers": 8}), "recurrent state of an unknown kind"),
    ],
)
def test_other_recurrences_are_refused(config: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        reference(hf.AutoModelForCausalLM.from_config(config).eval(), torch.tensor([[1, 2, 3]]))
