"""One mechanism for every architecture: the exported graph, run in uneven chunks, equals eager transformers, also as it is
rewritten for OpenVINO, and TensorRT-RTX builds it. docs/models.md says so.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import transformers as hf

from outrider.backends.onnxruntime.fusion.causal import without_masks
from outrider.backends.onnxruntime.fusion.fuse import fuse
from outrider.backends.openvino.reader import compiling
from outrider.backends.openvino.rewrite import NotExpressible, rewrite
from outrider.backends.openvino.session import PagedSession
from outrider.backends.rewriting.graphs import load
from outrider.backends.tensorrt.process import build_plan
from outrider.engines.arrays import Floats
from outrider.engines.contract import DOMAIN, GATED, GATED_DELTA, window_buckets
from outrider.engines.sizes import Sizes
from outrider.errors import EngineError, UnsupportedModelError
from outrider.export.checkpoints.checkpoint import load_model, max_positions, read_config
from outrider.export.checkpoints.source import Source
from outrider.export.graph.cache_layers import CacheLayout
from outrider.export.graph.step_model import trace
from outrider.export.parity import CAPACITY, CHUNKS, Exported, reference
from outrider.tests.export import models_page
from outrider.tests.export.architectures import CONFIGS, IN_TEST, NOT_BUILT, NOT_ON_OPENVINO, ONE_LAYER, REFUSED, WRITTEN_OUT
from outrider.tests.support import Fused, rtx_job

PRECISIONS = ("fp16", "bf16", "fp32")
COLUMNS = (
    *("class", "logit difference", "same argmax", "notable operators"),
    *("fused for ONNX Runtime", "on OpenVINO", "builds with TensorRT-RTX"),
)


@pytest.fixture(scope="module")
def page(request: pytest.FixtureRequest) -> Iterator[models_page.Table]:
    """The first table of docs/models.md."""
    yield from models_page.Table.fixture(request, "before", 1, COLUMNS, text)


def test_the_page_is_about_these_architectures(page: models_page.Table) -> None:
    page.check(text)


class Traced(NamedTuple):
    """An architecture's checkpoint and its graph in fp32."""

    name: str
    source: Source
    model: hf.PreTrainedModel
    layout: CacheLayout
    tokens: torch.Tensor
    want: Floats
    graph: Path


@pytest.fixture(
    scope="module", params=[each if each in IN_TEST else pytest.param(each, marks=pytest.mark.slow) for each in CONFIGS]
)
def traced(
    request: pytest.FixtureRequest, graphs_of: Callable[[str, Any], Path], tmp_path_factory: pytest.TempPathFactory
) -> Traced:
    made, folder = graphs_of(request.param, CONFIGS[request.param]), tmp_path_factory.mktemp("traced")
    source = Source.parse(str(made / "model"))
    model = load_model(source, "fp32")
    tokens = torch.randint(1, 320, (1, sum(CHUNKS)), generator=torch.Generator().manual_seed(1))
    want, layout, _ = reference(model, tokens)
    for file in made.glob("fp32.onnx*"):
        shutil.copy(file, folder)
    return Traced(request.param, source, model, layout, tokens, want, folder / "fp32.onnx")


def test_uneven_chunks_equal_eager_transformers(traced: Traced, page: models_page.Table) -> None:
    got = Exported(traced.graph, traced.layout, "fp32").logits(traced.tokens)
    difference = float(np.abs(traced.want - got).max())
    assert difference <= 1e-4
    assert (traced.want.argmax(-1) == got.argmax(-1)).all()
    graph = onnx.load(traced.graph, load_external_data=False)
    operators = {node.op_type for node in graph.graph.node}
    functions = {function.domain for function in graph.functions}  # what the graph defines itself
    assert {node.domain for node in graph.graph.node} <= {"", "ai.onnx", *functions}
    assert functions <= ({DOMAIN} if traced.layout.recurrent else set())
    assert "TensorScatter" in operators
    assert ("Attention" in operators) == (traced.name not in WRITTEN_OUT)
    page.says(traced.name, "class", f"`{type(traced.model).__name__}`")
    page.says(traced.name, "logit difference", models_page.power_of_ten(difference), figure=True)
    page.says(traced.name, "same argmax", "yes")
    notable = operators & {"Attention", "TensorScatter", "Tanh", "TopK", GATED, GATED_DELTA}
    page.says(traced.name, "notable operators", ", ".join(sorted(notable)))


def test_fused_for_onnx_runtime_it_computes_the_same(traced: Traced, page: models_page.Table) -> None:
    fused = traced.graph.with_name("fused.onnx")
    counts, left = fuse(load(traced.graph), fused, CAPACITY - 1, steady=True, batch=1)
    count = len(traced.layout.layers)
    assert left == ([] if traced.name not in WRITTEN_OUT else [f"attention of {count} of {count} layers", "it is written out"])
    got = Fused(fused, traced.layout, "fp32").logits(traced.tokens)
    assert float(np.abs(traced.want - got).max()) <= 1e-4
    assert counts["logits of some rows"] == 1
    page.says(traced.name, "fused for ONNX Runtime", ", ".join(counts))
    for most in (0, 2):
        last = np.concatenate([got[max(end - most, start) : end] for start, end in pairwise([0, *accumulate(CHUNKS)])])
        some = Fused(fused, traced.layout, "fp32", most).logits(traced.tokens)
        np.testing.assert_allclose(some, last, atol=1e-5)


def test_without_masks_for_cuda_it_computes_the_same(traced: Traced) -> None:
    causal = traced.graph.with_name("causal.onnx")
    counts = without_masks(load(traced.graph), causal)
    if traced.name in (*WRITTEN_OUT, "Mistral, sliding window"):
        assert counts == {}
        return
    assert counts == {"attention without a mask": len(traced.layout.layers) if traced.name != "Gemma-3" else 1}
    got = Exported(causal, traced.layout, "fp32").logits(traced.tokens)
    assert float(np.abs(traced.want - got).max()) <= 1e-4


def test_rewritten_for_openvino_it_computes_the_same(traced: Traced, page: models_page.Table) -> None:
    rewritten = traced.graph.with_name("openvino.onnx")
    if (reason := NOT_ON_OPENVINO.get(traced.name)) is not None:
        with pytest.raises(NotExpressible, match=reason):
            rewrite(load(traced.graph), rewritten)
        page.says(traced.name, "on OpenVINO", f"no: {reason}")
        return
    counts = rewrite(load(traced.graph), rewritten)
    assert (counts["attention"], counts["logits of some rows"]) == (len(traced.layout.layers), 1)
    sizes = Sizes(
        traced.layout.layers, traced.want.shape[-1], CAPACITY, window_buckets(CAPACITY), max_rows=max(CHUNKS), batch=2
    )
    with compiling(rewritten, "cpu", "fp32") as compiled:
        session = PagedSession(compiled, sizes)
    tokens = traced.tokens.numpy()
    got = []
    for start, end in pairwise([0, *accumulate(CHUNKS)]):
        session.write(tokens[:, start:end] ^ 1, np.array([start]), 0)  # another text in the slot before
        got.append(session.run(tokens[:, start:end], np.array([start]), 1)[0].copy())
    difference = float(np.abs(traced.want - np.concatenate(got)).max())
    assert difference <= 1e-4
    for slot in range(2):  # up to the last position, in either slot
        session.write(np.ones((1, 8), np.int64), np.array([CAPACITY - 8]), slot)
    page.says(traced.name, "on OpenVINO", models_page.power_of_ten(difference), figure=True)


@pytest.mark.parametrize("traced", ["Gemma-2"], indirect=True)
def test_tensorrt_rtx_builds_it(traced: Traced) -> None:
    """The next test has all of them, in every precision."""
    build_plans(traced, "fp32")


def test_heads_are_split_by_constant_shapes(traced: Traced) -> None:
    """Otherwise TensorRT does not know how many heads a query has, unless more is computed between the split and attention."""
    splits = []
    for node in ir.load(traced.graph).graph:
        above = node if node.op_type == "Attention" else None
        while above is not None and above.op_type != "Reshape":  # through a transposition, a norm, or a rotary embedding
            above = next((each.producer() for each in above.inputs if each is not None and each.producer() is not None), None)
        if above is not None:
            splits.append(above.inputs[1])
    assert bool(splits) == (traced.name not in ("Gemma-2", "GPT-OSS")), "soft caps and sinks are written out"
    assert all(shape is not None and shape.is_initializer() for shape in splits)


@pytest.mark.slow
def test_tensorrt_rtx_builds_it_in_every_precision(traced: Traced, page: models_page.Table) -> None:
    page.says(traced.name, "builds with TensorRT-RTX", ", ".join(build_plans(traced, *PRECISIONS)))


def build_plans(traced: Traced, *precisions: str) -> list[str]:
    """Build a plan in each precision, and return what the table says of them."""
    pytest.importorskip("tensorrt_rtx", reason="would show that every architecture builds: pip install 'outrider[rtx]'")
    results = {}
    with ThreadPoolExecutor(1) as pool:  # one precision is built while the next is traced
        for precision in precisions:
            path = traced.graph.with_name(f"{precision}.onnx")
            if precision != "fp32":
                trace(load_model(traced.source, precision), traced.layout).save(path, external_data=True)
            job = rtx_job(path, traced.layout.tensors())
            results[precision] = pool.submit(build_plan, job, traced.name)
    built, refused = list[str](), list[str]()
    for precision, result in results.items():
        expected = NOT_BUILT.get((traced.name, precision))
        if expected is None:
            result.result()
            built.append(precision)
        else:
            with pytest.raises(EngineError, match=re.escape(expected)):
                result.result()
            refused.append(f"not {precision}: {expected}")
    return [*built, *refused] if built else ["no: the compiler refuses the recurrence's `Loop`"]


@pytest.mark.parametrize(  # Falcon for the same reason as BLOOM
    "name", [pytest.param(each, marks=pytest.mark.slow) if each == "Falcon" else each for each in REFUSED]
)
def test_models_that_cannot_be_expressed_are_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    config, reason = REFUSED[name]
    config.save_pretrained(tmp_path)
    source = Source.parse(str(tmp_path))
    with pytest.raises(UnsupportedModelError, match=reason):
        read_config(source)
        model = hf.AutoModelForCausalLM.from_config(config).eval()
        _, layout, _ = reference(model, torch.tensor([[1, 2, 3]]))
        trace(model, layout)


@pytest.mark.parametrize(
    ("name", "limit"),
    [("Llama", 128), ("GPT-2", 128), ("Qwen3, YaRN", 128), ("Llama, dynamic RoPE", 64), ("Phi-3, long RoPE", 64)],
)
def test_a_text_is_no_longer_than_the_length_up_to_which_rotary_embeddings_stay_the_same(name: str, limit: int) -> None:
    assert max_positions(hf.AutoModelForCausalLM.from_config(deepcopy(CONFIGS[name]))) == limit


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),  # Qwen's recipe
        ({"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 32}, 64),
        ({"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "linear", "factor": 4.0}, 64),  # others write 64 for what is 16 times 4
    ],
)
def test_a_text_is_as_long_as_a_stretched_rotary_embedding_reaches(rope: dict[str, Any], limit: int) -> None:
    config = hf.LlamaConfig(**{**ONE_LAYER, "max_position_embeddings": 64}, rope_parameters={"rope_theta": 10000.0, **rope})
    assert max_positions(hf.AutoModelForCausalLM.from_config(config)) == limit


def text(page: models_page.Table) -> str:
    """The beginning of docs/models.md, with this table."""
    lines = [
        "# Supported models",
        "",
        "`outrider export` supports the architectures in the first table and refuses those in the second. The third table has",
        "the draft heads. The last section tries every architecture of transformers. An export fails if its graph does not",
        "compute what the checkpoint does.",
        "",
        "`make models-page` writes this page from the results of the tests (`tests/export/test_architectures.py`), which",
        "also check it, except for figures. They export a tiny random model of each architecture in fp32, run it on ONNX",
        f"Runtime in chunks of {', '.join(map(str, CHUNKS))} tokens, and compare it with eager transformers.",
        "",
        "- *Logit difference*: the largest difference, rounded up to a power of ten. The test fails if it exceeds 1e-4, or if",
        "  any row has another argmax.",
        "- *Fused for ONNX Runtime*: what `build-engine` rewrites in the graph. The logits stay the same within 1e-4.",
        "- *On OpenVINO*: the largest difference of the logits, with a text in another slot.",
        "- *Builds with TensorRT-RTX*: the precisions in which an engine builds with every profile (a prompt chunk; 1, 2, 3, 5",
        "  and 9 rows). The builds need no GPU. The engines have not run yet.",
        "",
        "## Supported",
        "",
        f"| architecture | {' | '.join(COLUMNS)} |",
        "|---|---|---|---|---|---|---|---|",
        *page.lines(CONFIGS),
    ]
    lines += ["", "## Refused", "", "| architecture | reason |", "|---|---|"]
    reasons = {
        "encoder-decoder": "an encoder-decoder",
        "no key/value cache": "no key/value cache",
        "no layer with attention": "no layer with attention",
        "of an unknown kind": "a recurrence other than gated delta nets, Mamba-2 and short convolutions",
        "its own attention code": "its own attention code, outside transformers' attention interface",
    }
    lines += [f"| {name} | {reasons[reason]} |" for name, (_, reason) in REFUSED.items()]
    return "\n".join(lines)
