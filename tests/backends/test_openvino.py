"""The backend `openvino`: what the bundle holds, the audit, commands and servers over it, what loading needs, what is refused.

That it computes what eager transformers does is in tests/export/test_architectures.py; the golden tests, those of the
scheduler and those of sessions run over it, too.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from outrider.audit.audit import Scope, audit
from outrider.backends.mapped import mapped
from outrider.backends.open import open_bundle, open_engines
from outrider.backends.openvino import reader
from outrider.backends.openvino.names import ATTENTION, BLOCK_WEIGHTS, EMBEDDING
from outrider.backends.openvino.reader import compiling, failed
from outrider.backends.openvino.rewrite import rewrite
from outrider.backends.rewriting.graphs import load
from outrider.bundle.folder import read_manifest
from outrider.bundle.manifest import model_file
from outrider.engines.arrays import Floats
from outrider.errors import DeviceError, EngineError, UsageError
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.tests.backends.openvino_slots import PRECISIONS, SLOTS
from outrider.tests.export.architectures import CONFIGS
from outrider.tests.serve.server import fetch, serving_here
from outrider.tests.support import reseal, run_here


@pytest.fixture(scope="module", params=PRECISIONS)
def bundle(request: pytest.FixtureRequest, trained_bundles: Callable[..., Path]) -> Path:
    return trained_bundles(request.param, backend="openvino", batch=SLOTS, k=[1, 4])


@pytest.mark.parametrize("change", ["a layer more", "a layer less", "wider keys", "more logits"])
def test_a_model_that_is_not_what_the_manifest_says_is_refused(trained_bundles: Callable[..., Path], change: str) -> None:
    bundle = trained_bundles("fp32", backend="openvino", batch=SLOTS, k=[1, 4])
    manifest, made = open_bundle(bundle)
    model = manifest.models["target"]
    (heads, width, value_width), *others = model.layers
    changes: dict[str, dict[str, Any]] = {
        "a layer more": {"layers": [*model.layers, model.layers[0]]},
        "a layer less": {"layers": others},
        "wider keys": {"layers": [(heads, 2 * width, value_width), *others]},
        "more logits": {"vocab_rows": model.vocab_rows + 1},
    }
    models = {**manifest.models, "target": msgspec.structs.replace(model, **changes[change])}
    with pytest.raises(EngineError, match="is not the engine that the manifest describes"):
        open_engines(bundle, msgspec.structs.replace(manifest, models=models), made).session("target", batch=1)


def test_the_bundle_has_one_copy_of_the_weights_in_their_precision(
    bundle: Path, trained_exports: Callable[[str], Path]
) -> None:
    manifest = read_manifest(bundle)
    export = trained_exports(manifest.models["target"].precision)
    for role in manifest.roles:
        graph = onnx.load(bundle / model_file(role), load_external_data=False).graph
        own = [node.op_type for node in graph.node if node.domain == "outrider"]
        quantized = manifest.models[role].quantization is not None
        assert own.count(ATTENTION) == len(manifest.models[role].layers)
        assert (BLOCK_WEIGHTS in own) == (EMBEDDING in own) == quantized
        sizes = [(folder / role / "model.onnx.data").stat().st_size for folder in (bundle, export)]
        assert sizes[0] < 1.01 * sizes[1]


def test_scales_are_those_of_the_export(trained_exports: Callable[[str], Path], tmp_path: Path) -> None:
    """In fp16, or in fp32 where fp16 cannot represent all of a matrix's exactly: scales of K-quants, for instance."""
    graph = onnx.load(trained_exports("int4") / model_file("draft"))
    scales = [each for each in graph.graph.initializer if each.name.endswith(".scale")]
    for each in scales[:-1]:
        halves = numpy_helper.to_array(each).astype(np.float16).astype(np.float32)
        each.CopyFrom(numpy_helper.from_array(halves, each.name))
    want = numbers(scales)
    onnx.save(graph, tmp_path / "model.onnx", save_as_external_data=True)
    rewrite(load(tmp_path / "model.onnx"), tmp_path / "rewritten.onnx")
    written = onnx.load(tmp_path / "rewritten.onnx").graph
    names = {node.input[1] for node in written.node if node.op_type == BLOCK_WEIGHTS}
    given = [each for each in written.initializer if each.name in names]
    assert {each.data_type for each in given} == {onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT}
    np.testing.assert_array_equal(numbers(given), want)


def numbers(tensors: list[onnx.TensorProto]) -> Floats:
    """All numbers in tensors, the smallest first."""
    return np.sort(np.concatenate([numpy_helper.to_array(each).reshape(-1) for each in tensors]))


def test_it_is_verified_against_onnx_runtime(bundle: Path, trained_exports: Callable[[str], Path]) -> None:
    precision = read_manifest(bundle).models["target"].precision
    # ONNX Runtime has no kernels for bf16 on the CPU.
    done = run_here("verify", bundle, "--engines", trained_exports("fp32" if precision == "bf16" else precision))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_audit_passes(trained_bundles: Callable[..., Path]) -> None:
    """Without its wrong samplers, which the host computes: the audit of ONNX Runtime has them."""
    bundle = trained_bundles("int4", backend="openvino", capacity=255, batch=8, k=[4])
    report = audit(Outrider.load(bundle, slots=None), draws=110, scope=Scope(controls=False))
    assert report.passed, report.verdicts()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int4", "int8", "fp32"])
def test_the_audit_passes_with_rounded_weights(trained_bundles: Callable[..., Path], precision: str) -> None:
    """And without, with more draws than above."""
    done = run_here("verify", trained_bundles(precision, backend="openvino", capacity=255, batch=8, k=[1, 4]))
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_command_takes_it(trained_bundles: Callable[..., Path], tmp_path: Path) -> None:
    bundle = trained_bundles("int4", backend="openvino", batch=SLOTS, k=[1, 4])
    shown = run_here("inspect", bundle)
    assert "openvino" in shown.stdout
    assert "attention" in shown.stdout
    texts = [
        run_here("generate", bundle, "--prompt", "Once upon a time", "--k", k, "--max-new-tokens", "40").stdout for k in "014"
    ]
    assert texts[0]
    assert len(set(texts)) == 1
    workload = tmp_path / "workload.jsonl"
    workload.write_text('{"workload": "story", "prompt": "Once upon a time"}\n')
    done = run_here("bench", bundle, "--workload", workload, "--max-new-tokens", "8", "--rounds", "2", "--json")
    assert done.returncode == 0, done.stderr


def test_a_server_answers_requests_together_as_each_alone(trained_bundles: Callable[..., Path]) -> None:
    bundle = trained_bundles("int4", backend="openvino", batch=SLOTS, k=[1, 4])
    alone = Outrider.load(bundle)
    prompts = ["Once upon a time", "def", "Question: Tom has 5 apples", "Customer: Hi, I would like to order a coffee."] * 2

    def asked(prompt: str) -> str:
        body = {"model": "target", "prompt": prompt, "max_tokens": 40, "temperature": 0}
        status, _, answer = fetch(f"{server.url}/v1/completions", json.dumps(body).encode())
        assert status == 200, answer
        return str(json.loads(answer)["choices"][0]["text"])

    with serving_here(bundle) as server, ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(asked, prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        events = alone.generate(prompt, SamplingParams(max_new_tokens=40), k=0)
        assert answer == "".join(event.text for event in events)


LOAD = """
import sys
for name in sys.argv[2].split(","):
    sys.modules[name] = None
from outrider.errors import OutriderError
from outrider.runtime.generation import Outrider
try:
    Outrider.load(sys.argv[1])
except OutriderError as error:
    print(error, "-", error.hint)
else:
    print(sorted(name for name in ("torch", "onnx", "onnx_ir", "transformers") if sys.modules.get(name)))
"""


def load_without(bundle: Path, missing: str) -> str:
    done = subprocess.run([sys.executable, "-c", LOAD, str(bundle), missing], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_it_runs_without_torch_and_what_only_a_build_needs(trained_bundles: Callable[..., Path]) -> None:
    bundle = trained_bundles("int4", backend="openvino", batch=SLOTS, k=[1, 4])
    assert load_without(bundle, "torch,onnx,onnx_ir,onnxscript") == "[]"


@pytest.mark.parametrize("missing", ["openvino", "onnxruntime"])
def test_a_missing_package_is_named(trained_bundles: Callable[..., Path], missing: str) -> None:
    said = load_without(trained_bundles("int4", backend="openvino", batch=SLOTS, k=[1, 4]), missing)
    assert said.startswith(f"{missing} cannot be imported: ")
    assert said.endswith(" - pip install 'outrider[openvino]'")


@pytest.mark.parametrize("device", ["gpu", "npu"])
def test_a_processor_that_is_not_here_is_named(bundle: Path, device: str) -> None:
    with pytest.raises(DeviceError, match=f"OpenVINO finds no device '{device.upper()}' here, only CPU"):
        Outrider.load(bundle, device=device)


def test_cuda_is_refused(bundle: Path) -> None:
    with pytest.raises(UsageError, match="openvino does not run on cuda"):
        Outrider.load(bundle, device="cuda")


def test_what_its_attention_does_not_cover_is_refused_by_name(
    tiny_export: Path, graphs_of: Callable[[str, Any], Path], tmp_path: Path
) -> None:
    """In an export whose target has the graph of a Gemma-2."""
    export = Path(shutil.copytree(tiny_export, tmp_path / "onnx"))
    onnx.save(onnx.load(graphs_of("Gemma-2", CONFIGS["Gemma-2"]) / "fp32.onnx"), export / model_file("target"))
    reseal(export)
    done = run_here("build-engine", export, "-o", tmp_path / "bundle", "--backend", "openvino", "--capacity", "64")
    assert done.returncode == 1
    assert "soft-capped scores, which openvino does not support" in done.stderr
    assert "--backend onnxruntime" in done.stderr
    assert not (tmp_path / "bundle").exists()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc; shows that no other memory is given back")
def test_only_what_is_still_mapped_is_given_back(
    trained_exports: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Addresses of a mapping that has ended may be those of other memory, which would lose what it holds. Weights of fp16 are
    computed with in fp32, so the compiled model keeps nothing of the file."""
    path = tmp_path / "model.onnx"
    rewrite(load(trained_exports("fp16") / model_file("target")), path)
    given = list[bool]()
    monkeypatch.setattr(reader, "give_back", lambda spans: given.append(bool(spans) and spans <= mapped(path)))
    with compiling(path, "cpu", "fp32"), compiling(path, "cpu", "fp32"):
        pass
    assert len(given) >= 2
    assert all(given)


class _Library(ctypes.Structure):
    """The parts of glibc's `struct dl_phdr_info` up to how often libraries were loaded and unloaded."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("segments", ctypes.c_void_p),
        ("segment_count", ctypes.c_uint16),
        ("loads", ctypes.c_ulonglong),
        ("unloads", ctypes.c_ulonglong),
    )


def unloads() -> int:
    """Return how often this process has unloaded a library."""
    counts = list[int]()

    def visit(library: Any, size: int, data: int | None) -> int:
        counts.append(library.contents.unloads)
        return 1  # ends the walk

    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Library), ctypes.c_size_t, ctypes.c_void_p)
    ctypes.CDLL(None).dl_iterate_phdr(kind(visit), None)
    return counts[0]


@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc; shows that loading a model unloads no library")
def test_loading_a_model_unloads_no_library(trained_exports: Callable[[str], Path], tmp_path: Path) -> None:
    """glibc ends a process now and then that starts a thread while it unloads libraries with thread-local storage, as OpenVINO
    does with those of devices that are not there."""
    path = tmp_path / "model.onnx"
    rewrite(load(trained_exports("fp16") / model_file("target")), path)
    before = unloads()
    for device in ("cpu", "gpu", "npu", "cpu"):
        with suppress(DeviceError), compiling(path, device, "fp32"):
            pass
    assert unloads() == before


def test_a_graph_that_this_openvino_does_not_take_is_one_line(trained_bundles: Callable[..., Path], tmp_path: Path) -> None:
    source = trained_bundles("fp32", backend="openvino", batch=SLOTS, k=[1, 4]) / model_file("target")
    graph = onnx.load(source)
    graph.graph.node[0].op_type = "Unheard"
    onnx.save(graph, tmp_path / "model.onnx")
    refused = pytest.raises(EngineError, match=r"OpenVINO cannot load .*Unheard")
    with refused as caught, compiling(tmp_path / "model.onnx", "cpu", "fp32"):
        pass
    assert "\n" not in str(caught.value)
    assert "pip install -U 'outrider[openvino]'" in str(caught.value.hint)


def test_too_little_memory_is_one_line() -> None:
    for error in (MemoryError(), RuntimeError("Exception from src/core.cpp:1:\nCannot allocate 99 bytes\n")):
        told = failed(error, "cannot load x")
        assert "memory" in told.hint
        assert "\n" not in str(told)


def test_a_cache_that_does_not_fit_is_refused_with_the_sizes(trained_bundles: Callable[..., Path], tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(trained_bundles("int4", backend="openvino", batch=SLOTS, k=[1, 4]), bundle)
    made = read_manifest(bundle)
    assert made.build is not None
    reseal(bundle, build=msgspec.structs.replace(made.build, batch=2**20))
    with pytest.raises(EngineError, match=r"no memory for a cache of 1048576 x 160 positions: it takes [\d,]+ bytes"):
        Outrider.load(bundle, slots=None)
