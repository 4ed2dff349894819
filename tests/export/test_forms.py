"""Quantized checkpoints in every form, kept as they are, on every backend. A section of docs/models.md has the outcome."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from transformers import AutoModelForCausalLM

from outrider.audit.audit import SAMPLED, Scope, audit
from outrider.audit.prompts import PROMPTS
from outrider.bundle.folder import read_manifest
from outrider.bundle.integrity import check_files
from outrider.export.checkpoints.checkpoint import load_model, open_model
from outrider.export.checkpoints.gguf_blocks import BLOCKS
from outrider.export.checkpoints.source import Source
from outrider.export.checkpoints.tokenizer import load_tokenizer
from outrider.export.pair import export_pair
from outrider.export.weights.block_linear import BlockLinear
from outrider.export.weights.quantize import quantize_model
from outrider.export.weights.rounding import AS_IS, Rounding
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.tests.export import models_page, quantized
from outrider.tests.export.gguf_files import write as write_gguf
from outrider.tests.export.refused_formats import LAYOUTS, METHODS
from outrider.tests.serve.server import fetch, serving_here
from outrider.tests.support import PAIR, build, run_here

GGUF = {f"GGUF {kind.name}": kind for kind in BLOCKS}
FORMS = {
    "AWQ": "awq",
    "GPTQ, symmetric": "gptq-symmetric",
    "GPTQ, asymmetric, with act-order": "gptq",
    "compressed-tensors, pack-quantized, symmetric, bf16 scales": "compressed-tensors",
    "compressed-tensors, pack-quantized, asymmetric": "ct-asymmetric",
    "compressed-tensors, int-quantized, int8, bf16 scales": "ct-int8",
    "AutoRound, packed as GPTQ": "auto-round",
    "ModelOpt AWQ, factors of inputs": "modelopt",
} | dict.fromkeys(GGUF, "")
ROUNDED = {
    "FP8, one scale for a weight": "fp8",
    "FP8 in blocks": "fp8-blocks",
    "compressed-tensors, FP8 of rows": "ct-fp8",
    "compressed-tensors, NVFP4": "ct-nvfp4",
    "compressed-tensors, MXFP4": "ct-mxfp4",
    "ModelOpt, NVFP4": "modelopt-nvfp4",
}
KEPT = "kept as"
DEQUANTIZED = "no: dequantized without loss"
NAMES = {"zero": "zero points", "offset": "offsets", "factors": "factors of inputs"}
BACKENDS = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO", "tensorrt-rtx": "TensorRT-RTX, TensorRT"}
COLUMNS = (KEPT, *BACKENDS.values())
QUICK = (("GPTQ, asymmetric, with act-order", "onnxruntime"), ("GGUF Q4_1", "openvino"))
SHORT = Scope(PROMPTS[:2], (), SAMPLED[:1], length=24, controls=False)
TYPES: dict[int, str] = {TensorProto.INT4: "int4", TensorProto.UINT4: "uint4", TensorProto.INT8: "int8"}


@pytest.fixture(scope="module")
def page(request: pytest.FixtureRequest) -> Iterator[models_page.Table]:
    """The quantized checkpoints of docs/models.md."""
    yield from models_page.Table.fixture(request, "forms", 1, COLUMNS, text)


def test_the_page_is_about_these_forms(page: models_page.Table) -> None:
    page.check(text)


def checkpoint(form: str, folder: Path) -> Path:
    if form in GGUF:
        write_gguf(folder / "model.gguf", kind=GGUF[form], width=256 if form.endswith("_K") else 64)
        return folder / "model.gguf"
    return quantized.write(PAIR / "target", folder / "model", (FORMS | ROUNDED)[form])


def on_backends(forms: Iterable[str]) -> list[Any]:
    """Each form on each backend; few of these are not slow."""
    pairs = [(form, backend) for form in forms for backend in BACKENDS]
    return [pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow) for each in pairs]


@pytest.mark.parametrize("form", FORMS)
def test_its_weights_are_kept(form: str, page: models_page.Table, tmp_path: Path) -> None:
    """With one input at 1 and the others at 0, they equal the dequantized checkpoint's bit for bit."""
    source = Source.parse(str(checkpoint(form, tmp_path)))
    whole = load_model(source, "int4")
    model, weights = open_model(source, "int4", tmp_path)
    found = quantize_model(model, weights, Rounding("int4", head_precision="int8", method=AS_IS), load_tokenizer(source), None)
    layers = {name: each for name, each in model.named_modules() if isinstance(each, BlockLinear) and each.exact}
    assert len(layers) == 14 + (found.rounded == [])
    for name, layer in layers.items():
        linear = whole.get_submodule(name)
        bias = 0 if linear.bias is None else linear.bias
        assert torch.equal(layer(torch.eye(linear.in_features)), linear.weight.T + bias)
    first = next(each for name, each in layers.items() if name.endswith("q_proj"))
    kind = f"{'int' if first.quantized.dtype == torch.int8 else 'uint'}{first.bits}"
    page.says(form, KEPT, ", ".join([kind, *(NAMES[part] for part in NAMES if getattr(first, part) is not None)]))


@pytest.mark.parametrize("form", ROUNDED)
def test_its_weights_are_dequantized(form: str, page: models_page.Table, tmp_path: Path) -> None:
    folder = checkpoint(form, tmp_path)
    options = ("--draft", "none", "--precision", "as-is", "-o", tmp_path / "export")
    done = run_here("export", "--target", folder, *options)
    assert done.returncode == 2
    assert "stores no integers that as-is could keep" in done.stderr
    assert ("its scales of activations and caches are left out" in done.stderr) == (form == "FP8, one scale for a weight")
    plain = quantized.dequantized(folder, tmp_path / "dequantized")
    want = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).state_dict()
    found = load_model(Source.parse(str(folder)), "fp32").state_dict()
    assert found.keys() == want.keys()
    assert all(torch.equal(each, want[name]) for name, each in found.items())
    page.says(form, KEPT, DEQUANTIZED)


@pytest.mark.parametrize(("form", "backend"), on_backends(ROUNDED))
def test_it_is_served_rounded(form: str, backend: str, page: models_page.Table, tmp_path: Path) -> None:
    export_pair(str(checkpoint(form, tmp_path)), None, tmp_path / "export", precision="int8")
    serve(tmp_path, backend)
    page.says(form, BACKENDS[backend], "builds, rounded" if backend == "tensorrt-rtx" else "rounded")


@pytest.mark.parametrize(("form", "backend"), on_backends(FORMS))
def test_it_is_served_as_it_is(form: str, backend: str, page: models_page.Table, tmp_path: Path) -> None:
    """With texts and distributions as in plain decoding, also over HTTP."""
    export_pair(str(checkpoint(form, tmp_path)), None, tmp_path / "export", precision="as-is")
    target = read_manifest(tmp_path / "export").models["target"]
    parity, quantization = target.parity, target.quantization
    assert quantization is not None
    assert parity.reference_perplexity is not None
    assert parity.unrounded_perplexity == pytest.approx(parity.reference_perplexity, rel=1e-3)
    parts = stored(tmp_path / "export" / "target" / "model.onnx")
    kinds = {TYPES[int(each.data_type)] for name, each in parts.items() if name.endswith("q_proj.quantized")}
    besides = [part for part in NAMES if any(name.endswith(f"q_proj.{part}") for name in parts)]
    page.says(form, KEPT, ", ".join([*kinds, *(NAMES[part] for part in besides)]))
    assert (quantization.method, quantization.rounded) == ("as-is", [] if form in GGUF and not besides else ["lm_head"])
    serve(tmp_path, backend)
    page.says(form, BACKENDS[backend], outcome(backend, bool({"zero", "offset"} & {*besides}), quantization.rounded, tmp_path))


def serve(folder: Path, backend: str) -> None:
    """Build a bundle of an export, and check its texts and distributions; TensorRT-RTX only builds."""
    sizes = {"capacity": 127, "k": [1, 4], "batch": 2}
    if backend == "tensorrt-rtx":
        pytest.importorskip("tensorrt_rtx", reason="would show that every form builds: pip install 'outrider[rtx]'")
        sizes |= {"batch": 1, "options": {"optimization_level": 0}}
    bundle = build(folder / "export", folder / "bundle", backend=backend, **sizes)
    if backend == "tensorrt-rtx":
        check_files(bundle, read_manifest(bundle))  # there is no GPU to run it
        return
    found = audit(Outrider.load(bundle, slots=None), draws=10, scope=SHORT)
    assert found.passed, found.as_dict()
    for texts in (found.greedy, found.batched):
        assert texts is not None
        assert texts.near_ties == []  # bit-identical
    with Outrider.load(bundle) as alone:
        want = "".join(event.text for event in alone.generate(PROMPTS[0], SamplingParams(max_new_tokens=16), k=0))
    asked = json.dumps({"model": "target", "prompt": PROMPTS[0], "max_tokens": 16, "temperature": 0}).encode()
    with serving_here(bundle, model="target") as server:
        answer = json.loads(fetch(f"{server.url}/v1/completions", asked)[2])
    assert answer["choices"][0]["text"] == want


def stored(path: Path) -> dict[str, onnx.TensorProto]:
    """The initializers of a graph by name."""
    return {each.name: each for each in onnx.load(path).graph.initializer}


def outcome(backend: str, more: bool, rounded: Sequence[str], folder: Path) -> str:
    """What a backend's kernels compute with, of weights with zero points or offsets or without, besides `rounded` modules."""
    if backend == "tensorrt-rtx":
        return "builds, with a product of group sums" if more else "builds"
    if backend == "onnxruntime":
        return "exact"
    parts = [stored(folder / each / "target" / "model.onnx") for each in ("export", "bundle")]
    own, given = ({name: numpy_helper.to_array(each) for name, each in some.items() if ".scale" in name} for some in parts)
    want, got = (np.unique(np.concatenate([each.reshape(-1) for each in scales.values()])) for scales in (own, given))
    np.testing.assert_array_equal(got, want)
    kept = [each for name, each in given.items() if not any(f".{module}." in name for module in rounded)]
    return "exact" if all(each.dtype == np.float16 for each in kept) else "exact, with scales in fp32"


def text(page: models_page.Table) -> str:
    """The quantized checkpoints of docs/models.md, below their heading."""
    lines = [
        "What `--precision as-is` keeps of tiny checkpoints in each form. On ONNX Runtime and OpenVINO, the audit passes with",
        "batches of two, without a near-tie. *Exact*: the kernels have the file's numbers. TensorRT's take integers and scales",
        "only; zero points and offsets become a product of the inputs' sums by group. OpenVINO's take scales in fp16, or in",
        "fp32 where fp16 cannot represent them exactly, which is more to read. An output head in 16 bits, or one with",
        "offsets, is rounded to int8. Floats (FP8, FP4) are dequantized, without loss in fp32, and rounded again as a whole;",
        "here, to int8.",
        "",
        f"| form | {' | '.join(COLUMNS)} |",
        "|---|---|---|---|---|",
        *page.lines([*FORMS, *ROUNDED]),
        "",
        *textwrap.wrap(f"Refused by name: {', '.join(METHODS)}, MLX.", 118),
        *textwrap.wrap(f"Refused by a module's name: {', '.join(LAYOUTS)}.", 118),
    ]
    return "\n".join(lines)
