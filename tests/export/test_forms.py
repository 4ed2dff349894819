"""Quantized checkpoints in every form, kept as they are, on every backend. A section of docs/models.md has the outcome."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from outrider.audit.audit import SAMPLED, Scope, audit
from outrider.audit.prompts import PROMPTS
from outrider.bundle.folder import read_manifest
from outrider.bundle.integrity import check_files
from outrider.export.checkpoints.gguf_blocks import BLOCKS
from outrider.export.pair import export_pair
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.tests.export import models_page, quantized
from outrider.tests.export.gguf_files import write as write_gguf
from outrider.tests.serve.server import fetch, serving_here
from outrider.tests.support import PAIR, build

GGUF = {f"GGUF {kind.name}": kind for kind in BLOCKS}
FORMS = {
    "AWQ": "awq",
    "GPTQ, asymmetric, with act-order": "gptq",
    "compressed-tensors, pack-quantized, symmetric, bf16 scales": "compressed-tensors",
    "ModelOpt AWQ, factors of inputs": "modelopt",
} | dict.fromkeys(GGUF, "")
KEPT = "kept as"
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
    return quantized.write(PAIR / "target", folder / "model", FORMS[form])


@pytest.mark.parametrize(
    ("form", "backend"),
    [
        pytest.param(form, backend, marks=() if (form, backend) in QUICK else pytest.mark.slow)
        for form in FORMS
        for backend in BACKENDS
    ],
)
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
    sizes = {"capacity": 127, "k": [1, 4], "batch": 2}
    if backend == "tensorrt-rtx":
        pytest.importorskip("tensorrt_rtx", reason="would show that every form builds: pip install 'outrider[rtx]'")
        sizes |= {"batch": 1, "options": {"optimization_level": 0}}
    bundle = build(tmp_path / "export", tmp_path / "bundle", backend=backend, **sizes)
    page.says(form, BACKENDS[backend], outcome(backend, bool({"zero", "offset"} & {*besides}), quantization.rounded, tmp_path))
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
        "fp32 where fp16 does not have them, which is more to read. An output head in 16 bits, or one with offsets, is rounded",
        "to int8. Other forms that are read (FP8, FP4) are rounded again as a whole.",
        "",
        f"| form | {' | '.join(COLUMNS)} |",
        "|---|---|---|---|---|",
        *page.lines(FORMS),
    ]
    return "\n".join(lines)
