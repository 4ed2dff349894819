"""EAGLE-3 heads of every format: the graphs compute what other implementations do, and TensorRT-RTX builds them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from outrider.backends.onnxruntime.engine import OnnxRuntimeEngine
from outrider.backends.tensorrt.process import build_plan
from outrider.engines.contract import cache_tensors, step_tensors, window_buckets
from outrider.engines.device import Cpu
from outrider.engines.graph_session import GraphSession
from outrider.engines.session import Pass
from outrider.engines.sizes import Sizes
from outrider.export.checkpoints.source import Source
from outrider.export.graph.cache_layers import CacheLayout
from outrider.export.graph.step_model import trace
from outrider.export.heads.eagle3 import Eagle3Checkpoint
from outrider.tests.export import models_page
from outrider.tests.export.eagle3 import cases, weights
from outrider.tests.export.eagle3.checkpoints import target, write
from outrider.tests.support import rtx_job

COLUMNS = ("difference", "builds with TensorRT-RTX")


@pytest.fixture(scope="module")
def page(request: pytest.FixtureRequest) -> Iterator[models_page.Table]:
    """The draft heads of docs/models.md."""
    yield from models_page.Table.fixture(request, "heads", 2, COLUMNS, text)


def test_the_page_is_about_these_heads(page: models_page.Table) -> None:
    page.check(text)


CAPACITY, TOLERANCE = 64, 1e-4


@pytest.fixture(scope="module")
def fixtures() -> dict[str, np.ndarray]:
    """What speculators' modules compute; see `eagle3/make_fixtures.py`."""
    with np.load(Path(weights.__file__).with_name("fixtures.npz")) as arrays:
        return dict(arrays)


@pytest.mark.parametrize("name", cases.CASES)
def test_a_head_computes_what_speculators_does(
    name: str, fixtures: dict[str, np.ndarray], page: models_page.Table, tmp_path: Path
) -> None:
    """In eager transformers: a prefill, and chains of draft steps after prefixes of every length."""
    checkpoint = Eagle3Checkpoint.read(Source.parse(str(write(tmp_path, name))))
    mixer, head = checkpoint.build(target(name))
    assert mixer.ids == list(cases.CASES[name].inputs_of or (2, 4, 5))
    known = torch.from_numpy(weights.target_ids(name))
    hidden, tokens = map(torch.from_numpy, weights.inputs(name))
    differences = []

    def compare(got: torch.Tensor, kind: str, *at: int) -> None:
        differences.append(float(np.abs(got.numpy() - fixtures[f"{name}/{kind}"][at]).max()))
        assert differences[-1] <= TOLERANCE

    with torch.no_grad():
        features = mixer([*hidden[None].chunk(len(mixer.ids), -1)])
        logits, output = head(tokens[None, 1:], features, torch.arange(cases.ROWS)[None], DynamicCache())
        compare(logits[0][:, known], "logits")
        compare(output[0], "hidden")
        for prefix, length in enumerate(cases.PREFIXES):
            ids, read = tokens[None, 1 : length + 1], features[:, :length]
            made = output[:, length - 1 : length]
            for step in range(cases.STEPS):
                ids = torch.cat([ids, torch.tensor([[int(fixtures[f"{name}/chain_tokens"][prefix, step])]])], 1)
                read = torch.cat([read, made], 1)
                logits, all_made = head(ids, read, torch.arange(ids.shape[1])[None], DynamicCache())
                made = all_made[:, -1:]
                compare(logits[0, -1, known], "chain_logits", prefix, step)
                compare(made[0, 0], "chain_hidden", prefix, step)
    page.says(row(name), "difference", models_page.power_of_ten(max(differences)), figure=True)


@pytest.mark.parametrize("name", cases.PARALLEL)
def test_a_head_with_masks_computes_what_speculators_does(name: str, fixtures: dict[str, np.ndarray], tmp_path: Path) -> None:
    """P-EAGLE: several tokens from one pass."""
    mixer, head = Eagle3Checkpoint.read(Source.parse(str(write(tmp_path, name)))).build(target(name))
    hidden, tokens = map(torch.from_numpy, weights.inputs(name))
    masks = [cases.PARALLEL[name].mask] * (cases.STEPS - 1)
    known = torch.from_numpy(weights.target_ids(name))
    for index, prefix in enumerate(cases.PREFIXES):
        ids = torch.tensor([[*tokens[1 : prefix + 1].tolist(), *masks]])
        with torch.no_grad():
            features = mixer([*hidden[None, :prefix].chunk(len(mixer.ids), -1)])
            features = torch.nn.functional.pad(features, (0, 0, 0, len(masks)))  # a mask's is its own
            logits, _ = head(ids, features, torch.arange(ids.shape[1])[None], DynamicCache())
        got = logits[0, -cases.STEPS :][:, known]
        np.testing.assert_allclose(got, fixtures[f"{name}/parallel"][index], atol=TOLERANCE)


IN_CI = ("speculators-residual-before-fc-output", "speculators-two-layers-mixed")  # every flag, and several layers


@pytest.mark.parametrize(
    "name", [each if each in IN_CI else pytest.param(each, marks=pytest.mark.slow) for each in cases.CASES]
)
def test_its_graph_drafts_as_speculators_does_after_acceptances_of_every_length(
    name: str, fixtures: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """Rounds as the runtime runs them: the context of each round replaces what the draft steps before it wrote."""
    mixer, head = Eagle3Checkpoint.read(Source.parse(str(write(tmp_path / "head", name)))).build(target(name))
    width, case = cases.HIDDEN, cases.CASES[name]
    layers = [(cases.KV_HEADS, case.head_dim, case.head_dim)] * case.layers
    path = tmp_path / "head.onnx"
    trace(head, CacheLayout(layers), features=width, is_head=True).save(path, external_data=True)
    inputs, outputs = step_tensors(layers, cases.VOCAB, "fp32", width, reads_features=True)
    sizes = Sizes(layers, cases.VOCAB, CAPACITY, window_buckets(CAPACITY), 16, 1, width, reads_features=True)
    device = Cpu()
    session = GraphSession(device, OnnxRuntimeEngine(path, [*inputs, *outputs], device), "fp32", sizes)
    hidden, tokens = weights.inputs(name)
    with torch.no_grad():
        features = mixer([*torch.from_numpy(hidden)[None].chunk(len(mixer.ids), -1)])[0].numpy()
    known = weights.target_ids(name)
    position, to = (device.zeros((1,), "int64", "a step") for _ in range(2))

    def written() -> np.ndarray:
        return session.cache()["past_features"][:, 0, :CAPACITY].copy()

    def draft_step(rows: list[int], at: int) -> tuple[np.ndarray, np.ndarray]:
        """The logits of the last of these rows, and the feature of the next one, which it writes."""
        given = device.zeros((1, len(rows)), "int64", "a step")
        logits = device.zeros((1, len(rows), cases.VOCAB), "float32", "a step")
        given.view()[:], position.view()[:], to.view()[:] = rows, at, at + len(rows)
        session.bind(Pass(given, position, logits, session.window(len(rows), at, at), feature_positions=to))()
        return logits.view()[0, -1, known].copy(), written()[0, at + len(rows)]

    def same(got: tuple[np.ndarray, np.ndarray], logits: np.ndarray, feature: np.ndarray) -> None:
        np.testing.assert_allclose(got[0], logits, atol=TOLERANCE)
        np.testing.assert_allclose(got[1], feature, atol=TOLERANCE)

    first, last = cases.PREFIXES[0], cases.PREFIXES[-1]
    for accepted in range(last - first):  # in each round; it emits one token more
        session.set_features(np.zeros((1, CAPACITY, width), np.float32))
        before = 0
        for length in range(first, last + 1, accepted + 1):
            kept = written()
            kept[0, :length] = features[:length]  # the target's pass
            session.set_features(kept)
            results = {kind: fixtures[f"{name}/{kind}"] for kind in ("logits", "hidden", "chain_logits", "chain_hidden")}
            got = draft_step(tokens[before + 1 : length + 1].tolist(), before)
            same(got, results["logits"][length - 1], results["hidden"][length - 1])
            prefix = length - first
            for step, token in enumerate(fixtures[f"{name}/chain_tokens"][prefix]):
                got = draft_step([int(token)], length + step)
                same(got, results["chain_logits"][prefix, step], results["chain_hidden"][prefix, step])
            before = length


def test_tensorrt_rtx_builds_it(tmp_path: Path) -> None:
    """The head with the most norms; the next test has all of them, in either precision."""
    build_plans("specforge-3.1", tmp_path, "fp16")


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.CASES)
def test_tensorrt_rtx_builds_it_in_every_precision(name: str, page: models_page.Table, tmp_path: Path) -> None:
    page.says(row(name), "builds with TensorRT-RTX", ", ".join(build_plans(name, tmp_path, "fp16", "fp32")))


def build_plans(name: str, folder: Path, *precisions: str) -> tuple[str, ...]:
    """Build a case's plan in each precision, with every profile, and return them."""
    pytest.importorskip("tensorrt_rtx", reason="would show that every head builds: pip install 'outrider[rtx]'")
    mixer, head = Eagle3Checkpoint.read(Source.parse(str(write(folder / "head", name)))).build(target(name))
    case = cases.CASES[name]
    layers = [(cases.KV_HEADS, case.head_dim, case.head_dim)] * case.layers
    for precision in precisions:
        path = folder / f"{precision}.onnx"
        head.to({"fp16": torch.float16, "fp32": torch.float32}[precision])
        trace(head, CacheLayout(layers), features=mixer.hidden_size, is_head=True).save(path, external_data=True)
        build_plan(rtx_job(path, cache_tensors(layers, mixer.hidden_size), "head"), name)
    return precisions


def row(name: str) -> str:
    """The beginning of a case's row."""
    flags = name.removeprefix("speculators-0.1").removeprefix(name.split("-")[0]).strip("-").replace("-", " ")
    return f"{cases.CASES[name].format} | {flags or 'none'}"


def text(page: models_page.Table) -> str:
    """The draft heads of docs/models.md, below their heading."""
    lines = [
        "Tiny random EAGLE-3 heads in fp32, in every format, are compared with the modules of speculators 0.9.0",
        "(`tests/export/eagle3/`) and built for TensorRT-RTX with every profile. *Difference* is the largest difference of",
        "logits and hidden states over a prefill and chained draft steps, rounded up to a power of ten. Unknown configuration",
        "keys or tensors are refused.",
        "",
        f"| format | flags | {' | '.join(COLUMNS)} |",
        "|---|---|---|---|",
        *page.lines(map(row, cases.CASES)),
    ]
    return "\n".join(lines)


@pytest.mark.parametrize("reading", cases.OTHER_READINGS)
def test_other_readings_of_a_checkpoint_would_be_noticed(reading: str, fixtures: dict[str, np.ndarray]) -> None:
    """The tolerance tells what some trainers computed from what servers compute."""
    case = cases.OTHER_READINGS[reading]
    differences = [
        np.abs(fixtures[f"{reading}/{what}"] - fixtures[f"{case}/{what}"]).max() for what in ("hidden", "chain_logits")
    ]
    assert max(differences) > 100 * TOLERANCE
