"""Block heads (DFlash, DSpark) of every format: graphs compute what speculators does, and what is not understood is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from outrider.backends.onnxruntime.engine import OnnxRuntimeEngine
from outrider.backends.tensorrt.process import build_plan
from outrider.engines.contract import BLOCK_STATE, CONTEXT, cache_tensors, step_tensors, window_buckets
from outrider.engines.device import Cpu
from outrider.engines.graph_session import GraphSession
from outrider.engines.sizes import Sizes
from outrider.errors import OutriderError, SourceError, UnsupportedModelError, UsageError
from outrider.export.checkpoints.source import Source
from outrider.export.graph.cache_layers import CacheLayout
from outrider.export.graph.step_model import trace
from outrider.export.heads.block_head import BlockCheckpoint, BlockHead
from outrider.export.heads.draft_head import FeatureMixer, Target
from outrider.export.heads.markov import MarkovStep, export_markov
from outrider.export.pair import export_pair
from outrider.export.parity import open_graph
from outrider.tests.drafts import random_block_head
from outrider.tests.export.block_head import weights
from outrider.tests.export.head_files import Change, write_head
from outrider.tests.support import PAIR, build, llama, rtx_job, write_checkpoint

CAPACITY, TOLERANCE = 64, 1e-4
Fixtures = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def fixtures() -> Fixtures:
    """What speculators' modules compute; see `block_head/make_fixtures.py`."""
    with np.load(Path(weights.__file__).with_name("fixtures.npz")) as arrays:
        return dict(arrays)


def target(name: str, **changes: Any) -> Target:
    embedding, head = map(torch.from_numpy, weights.target(name).values())
    given = {"layers": weights.TARGET_LAYERS, "hidden_size": weights.HIDDEN, "vocab_rows": weights.VOCAB}
    return Target(name="the target", **(given | changes), embedding=embedding, output_head=head)


def built(folder: Path, name: str) -> tuple[FeatureMixer, BlockHead]:
    mixer, head = BlockCheckpoint.read(Source.parse(str(write_head(folder, *weights.checkpoint(name))))).build(target(name))
    assert mixer.ids == weights.CASES[name].features
    assert isinstance(head, BlockHead)
    return mixer, head


def mixed(mixer: FeatureMixer, name: str) -> torch.Tensor:
    """The features of the text, [1, ROWS, H]."""
    with torch.no_grad():
        features: torch.Tensor = mixer([*torch.from_numpy(weights.inputs(name)[0])[None].chunk(len(mixer.ids), -1)])
    return features


def block(name: str, anchor: int) -> list[int]:
    """The tokens of the block behind an anchor, as many as in training."""
    return [int(weights.inputs(name)[1][anchor]), *[weights.MASK] * (weights.CASES[name].block - 1)]


GRAPHS = ("deepspec-dspark", "dspark-gated")  # in `make test`; each export compares its graph with the module
WITH_GRAPHS = [
    pytest.param(name, True, marks=() if name in GRAPHS else pytest.mark.slow, id=f"{name}-graph")
    for name, case in weights.CASES.items()
    if case.is_dspark
]


@pytest.mark.parametrize(("name", "in_graph"), [*(pytest.param(each, False, id=each) for each in weights.CASES), *WITH_GRAPHS])
def test_a_head_computes_what_speculators_does(name: str, in_graph: bool, fixtures: Fixtures, tmp_path: Path) -> None:
    """In eager transformers, also with the Markov and confidence heads in their graph."""
    mixer, head = built(tmp_path, name)
    features, known, drafted = mixed(mixer, name), weights.target_ids(name), weights.CASES[name].drafted
    tokens = weights.inputs(name)[1]
    if in_graph:
        export_markov(head, tmp_path / "markov.onnx", weights.VOCAB, "fp32")
        graph = open_graph(tmp_path / "markov.onnx", "fp32")
    for index, anchor in enumerate(weights.ANCHORS):
        ids = torch.tensor([[CONTEXT] * anchor + block(name, anchor)])
        padded = torch.nn.functional.pad(features, (0, 0, 0, ids.shape[1]))[:, : ids.shape[1]]
        with torch.no_grad():
            logits, _, *state = head(ids, padded, torch.arange(ids.shape[1])[None], DynamicCache())
        rows = logits[0, -drafted:].numpy()
        np.testing.assert_allclose(rows[:, known], fixtures[f"{name}/logits"][index], atol=TOLERANCE)
        assert bool(state) == weights.CASES[name].is_dspark
        if not state:
            continue
        before = tokens[anchor : anchor + drafted, None]
        given = {"logits": rows[:, None], BLOCK_STATE: state[0][0, -drafted:, None].numpy(), "before": before}
        if in_graph:
            biased, confidence = graph.run(None, given)
        else:
            with torch.no_grad():
                biased, confidence = (each.numpy() for each in MarkovStep(head)(*map(torch.from_numpy, given.values())))
        expected = fixtures.get(f"{name}/biased", fixtures[f"{name}/logits"])[index]
        np.testing.assert_allclose(biased[:, 0, known], expected, atol=TOLERANCE)
        if weights.CASES[name].confidence:
            np.testing.assert_allclose(confidence[:, 0], fixtures[f"{name}/confidence"][index], atol=TOLERANCE)
        else:
            np.testing.assert_allclose(confidence[:, 0], torch.tensor(expected).softmax(-1).amax(-1), atol=TOLERANCE)


def states(head: BlockHead, name: str, features: np.ndarray, anchor: int) -> list[np.ndarray]:
    """What the eager head gives to its own heads for a block, if it has any."""
    ids = torch.tensor([[CONTEXT] * anchor + block(name, anchor)])
    with torch.no_grad():
        given = torch.from_numpy(features[:, : ids.shape[1]])
        _, _, *found = head(ids, given, torch.arange(ids.shape[1])[None], DynamicCache())
    return [each[0, -weights.CASES[name].drafted :].numpy() for each in found]


IN_CI = ("deepspec-dspark", "speculators-windows")  # full attention with heads of its own, and windows


@pytest.mark.parametrize(
    "name", [each if each in IN_CI else pytest.param(each, marks=pytest.mark.slow) for each in weights.CASES]
)
def test_its_graph_drafts_as_speculators_does_after_contexts_of_every_length(
    name: str, fixtures: Fixtures, tmp_path: Path
) -> None:
    """Rounds as the runtime runs them: each context replaces what the block before it wrote."""
    mixer, head = built(tmp_path / "head", name)
    case, known = weights.CASES[name], weights.target_ids(name)
    layers = [(weights.KV_HEADS, weights.HEAD_DIM, weights.HEAD_DIM)] * case.layers
    path, sizes = tmp_path / "head.onnx", (layers, weights.VOCAB)
    padded = np.zeros((1, CAPACITY, weights.HIDDEN), np.float32)
    padded[:, : weights.ROWS] = mixed(mixer, name).numpy()
    expected_states = {anchor: states(head, name, padded, anchor) for anchor in weights.ANCHORS}
    trace(head, CacheLayout(layers), features=weights.HIDDEN, is_head=True).save(path, external_data=True)
    inputs, outputs = step_tensors(*sizes, "fp32", weights.HIDDEN, True, head.block_state)
    device = Cpu()
    session = GraphSession(
        device,
        OnnxRuntimeEngine(path, [*inputs, *outputs], device),
        "fp32",
        Sizes(
            *sizes, CAPACITY, window_buckets(CAPACITY), 16, 1, weights.HIDDEN, reads_features=True, block_state=head.block_state
        ),
    )
    session.set_features(padded)
    for step in (1, 2, 3):  # anchors between those that are compared
        read = 0
        session.clear(0)
        for anchor in range(1, weights.ANCHORS[-1] + 1, 1):
            if anchor not in weights.ANCHORS and anchor % step:
                continue
            ids = np.array([[CONTEXT] * (anchor - read) + block(name, anchor)])
            logits = session.run(ids, np.array([read]))[0, -case.drafted :]
            read = anchor
            if anchor in weights.ANCHORS:
                expected = fixtures[f"{name}/logits"][weights.ANCHORS.index(anchor)]
                np.testing.assert_allclose(logits[:, known], expected, atol=TOLERANCE)
                assert np.isneginf(np.delete(logits, known, axis=1)).all()
                for state in expected_states[anchor]:
                    got = device.read(session.block_state(1, ids.shape[1]))[0, -case.drafted :]
                    np.testing.assert_allclose(got, state, atol=TOLERANCE)


@pytest.mark.parametrize(
    "name", [each if each == IN_CI[0] else pytest.param(each, marks=pytest.mark.slow) for each in weights.CASES]
)
@pytest.mark.parametrize("precision", ["fp16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_tensorrt_rtx_builds_it(name: str, precision: str, tmp_path: Path) -> None:
    _, head = built(tmp_path / "head", name)
    layers = [(weights.KV_HEADS, weights.HEAD_DIM, weights.HEAD_DIM)] * weights.CASES[name].layers
    model = head.half() if precision == "fp16" else head
    trace(model, CacheLayout(layers), features=weights.HIDDEN, is_head=True).save(tmp_path / "head.onnx", external_data=True)
    build_plan(rtx_job(tmp_path / "head.onnx", cache_tensors(layers, weights.HIDDEN), "block-head"), name)
    assert (tmp_path / "head.plan").stat().st_size > 1000
    if head.block_state is not None:
        export_markov(model, tmp_path / "markov.onnx", weights.VOCAB, precision)


@pytest.mark.slow
def test_tensorrt_rtx_builds_a_bundle_with_its_own_heads(tmp_path: Path) -> None:
    head = random_block_head(tmp_path / "head")
    export_pair(str(PAIR / "target"), str(head), tmp_path / "onnx", precision="fp16")
    build(tmp_path / "onnx", tmp_path / "bundle", backend="tensorrt-rtx", k=[1, 4], capacity=128)
    assert (tmp_path / "bundle" / "sampler" / "markov.plan").stat().st_size > 1000


def changed(key: str, value: object, *, nested: str | None = None) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        (config if nested is None else config[nested])[key] = value

    return change


def without(tensor: str) -> Change:
    return lambda config, tensors: tensors.__delitem__(tensor)


def with_tensor(name: str, *shape: int) -> Change:
    return lambda config, tensors: tensors.__setitem__(name, torch.zeros(shape))


BAD: dict[str, tuple[str, Change, type[OutriderError], str]] = {
    "an unknown key": ("z-lab", changed("attention_sinks", 4), UnsupportedModelError, "attention_sinks = 4"),
    "an unknown key of DFlash": (
        "z-lab",
        changed("causal", True, nested="dflash_config"),
        UnsupportedModelError,
        "causal = true",
    ),
    "windows that z-lab does not define": (
        "z-lab",
        changed("layer_types", ["sliding_attention", "full_attention"]),
        UnsupportedModelError,
        "sliding windows",
    ),
    "a Markov head with a memory": (
        "dspark",
        changed("markov_head_type", "rnn"),
        UnsupportedModelError,
        "markov_head_type = 'rnn'",
    ),
    "confidence without the Markov head it reads": (
        "dspark-confidence",
        changed("confidence_head_with_markov", True),
        SourceError,
        "no Markov head",
    ),
    "no mask": ("z-lab", changed("mask_token_id", None, nested="dflash_config"), SourceError, "no mask_token_id"),
    "a mask beyond the vocabulary": ("speculators", changed("mask_token_id", 96), UnsupportedModelError, "mask token is 96"),
    "a text for an object": ("z-lab", changed("dflash_config", "masks"), SourceError, "dflash_config"),
    "a target of another depth": ("z-lab", changed("num_target_layers", 12), UnsupportedModelError, "it is for 12 layers"),
    "no block": ("z-lab", changed("block_size", None), SourceError, "no block_size"),
    "layers of Gemma": ("deepspec", changed("model_type", "gemma4"), UnsupportedModelError, "'gemma4'"),
    "layers of Llama": ("z-lab", changed("model_type", "llama"), UnsupportedModelError, "'llama' in a block head"),
    "no layers of the target": ("speculators", changed("aux_hidden_state_layer_ids", None), SourceError, "does not say which"),
    "the output of the last layer": (
        "speculators",
        changed("aux_hidden_state_layer_ids", [2, 4, 8]),
        UnsupportedModelError,
        "the output of the target's last layer",
    ),
    "more layers than fc has inputs for": (
        "z-lab",
        changed("target_layer_ids", [1, 2, 3, 4], nested="dflash_config"),
        UnsupportedModelError,
        "inputs of fc",
    ),
    "a missing tensor": ("z-lab", without("layers.1.self_attn.k_norm.weight"), SourceError, "no tensor layers.1"),
    "an unknown tensor": ("z-lab", with_tensor("aux_hidden_norms.0.weight", 32), UnsupportedModelError, "aux_hidden_norms"),
    "a tensor of another shape": ("z-lab", with_tensor("hidden_norm.weight", 31), SourceError, "hidden_norm.weight"),
    "a text for a number": ("z-lab", changed("block_size", "four"), SourceError, "block_size"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_understood_is_refused(case: str, tmp_path: Path) -> None:
    name, change, kind, message = BAD[case]
    folder = write_head(tmp_path, *weights.checkpoint(name), change)
    with pytest.raises(kind) as raised:
        BlockCheckpoint.read(Source.parse(str(folder))).build(target(name))
    assert message in str(raised.value)
    assert raised.value.hint


def test_one_head_reads_the_target_at_a_time(tmp_path: Path) -> None:
    made = write_checkpoint(tmp_path / "target", llama(vocab_size=320))
    heads = [write_head(tmp_path / name, *weights.checkpoint(name)) for name in ("z-lab", "dspark")]
    with pytest.raises(UsageError, match="two drafts of the same kind: z-lab and dspark"):
        export_pair(str(made), [str(each) for each in heads], tmp_path / "onnx", precision="fp32")
    assert not (tmp_path / "onnx").exists()
