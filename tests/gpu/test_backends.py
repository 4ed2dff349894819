"""What only a GPU can show of each backend that is installed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from transformers import AutoModelForCausalLM, Qwen2Config

from outrider.backends.open import open_bundle, open_engines
from outrider.backends.tensorrt.package import plan_file
from outrider.bundle.folder import read_manifest
from outrider.bundle.manifest import graph_files
from outrider.engines.device import Cpu, Device
from outrider.errors import EngineError
from outrider.export.pair import export_pair
from outrider.runtime.generation import Event, Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.rounds.recording import RECORD_AT
from outrider.runtime.scheduler import Scheduler
from outrider.tests.gpu.exports import SECONDS
from outrider.tests.support import BROKEN, build, reseal, run, write_checkpoint

K = (1, 2, 4, 8)
PROMPT = "Customer: Hi, I would like to order a coffee.\nAgent:"
Record = Callable[[str, object], None]
Exports = Callable[[str], Path]
Bundles = Callable[..., Path]
SETTINGS: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 0.7, "rule": "exact-match"})


@pytest.fixture(scope="module")
def loaded(bundles: Bundles) -> Iterator[Outrider]:
    outrider = Outrider.load(bundles("fp16"))
    yield outrider
    outrider.close()


def tokens(outrider: Outrider, k: int, **params: Any) -> list[int]:
    usual: dict[str, Any] = {"max_new_tokens": 100, "seed": 5, "rule": "rejection"}
    asked = SamplingParams(**(usual | params))
    return [token for event in outrider.generate(PROMPT, asked, k=k) for token in event.token_ids]


@pytest.mark.gpu("every engine computes what ONNX Runtime does on the CPU, in every profile")
@pytest.mark.parametrize("precision", ["fp16", "fp32", "bf16", "int4"])
def test_engines_compute_what_onnx_runtime_does(
    bundles: Bundles, exports: Exports, precision: str, record_property: Record
) -> None:
    bundle = bundles(precision)
    reference = exports("fp32" if precision == "bf16" else precision)  # ONNX Runtime has no bf16 kernels for CPUs
    done = run("verify", bundle, "--engines", reference, "--json", timeout=SECONDS)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)["engines"]
    assert [each for each in found if not each["passed"]] == []
    assert {each["engine"] for each in found} == set(read_manifest(bundle).engines)
    record_property("largest difference in tolerances", round(max(each["difference"] / each["tolerance"] for each in found), 3))


@pytest.mark.gpu("the losslessness audit passes, also for batches of four")
@pytest.mark.parametrize("precision", ["fp16", "int4"])
def test_the_audit_passes(bundles: Bundles, precision: str, record_property: Record) -> None:
    done = run("verify", bundles(precision, "--batch", "4"), timeout=SECONDS)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    verdicts = "; ".join(line for line in lines if re.search(r"^\w+ (pass|FAIL)|, token \d+: |WRONG|^the bundle", line))
    assert done.returncode == 0, verdicts or done.stderr
    record_property("audit", verdicts)


@pytest.mark.gpu("a row alone has the same bits from run to run, in a layer as wide as a 7B model's")
def test_lone_rows_have_the_same_bits(backend: dict[str, Any], tmp_path: Path) -> None:
    widths = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}
    config = Qwen2Config(num_hidden_layers=1, vocab_size=1024, bos_token_id=None, eos_token_id=0, **widths)
    checkpoint = write_checkpoint(tmp_path / "wide", AutoModelForCausalLM.from_config(config))
    export_pair(str(checkpoint), None, tmp_path / "onnx", precision="fp16")
    bundle = build(tmp_path / "onnx", tmp_path / "bundle", k=[1], capacity=64, **backend)
    session = open_engines(bundle, *open_bundle(bundle)).session("target", 1)
    assert len({session.run(np.array([[1]]), np.array([0])).tobytes() for _ in range(50)}) == 1


def placement(bundle: Path, device: Device) -> dict[str, str]:
    """Return, for each engine of a bundle, how many of its nodes ONNX Runtime runs where.

    A node on the CPU, or a copy between the two, makes the GPU wait for the host.
    """
    from outrider.backends.onnxruntime.engine import inference_session

    counts = {}
    for name in read_manifest(bundle).engines:
        session = inference_session(bundle / graph_files(name)[0], device, record_placement=True)
        nodes: Counter[str] = Counter()
        for part in session.get_provider_graph_assignment_info():
            nodes[part.ep_name.removesuffix("ExecutionProvider")] += len(part.get_nodes())
        counts[name] = ", ".join(f"{count} {where}" for where, count in nodes.most_common())
    return counts


@pytest.mark.gpu("ONNX Runtime runs the nodes of every engine on the GPU")
def test_the_report_says_where_nodes_run(backend: dict[str, Any], bundles: Bundles, record_property: Record) -> None:
    if backend["backend"] != "onnxruntime":
        pytest.skip("TensorRT runs whole engines")
    from outrider.engines.cuda import Cuda  # which needs a package that other machines lack

    for name, nodes in placement(bundles("fp16"), Cuda()).items():
        record_property(name, nodes)


def test_placement_counts_the_nodes_of_every_engine(tiny_bundle: Path) -> None:
    placed = placement(tiny_bundle, Cpu())
    assert {"target", "draft", "verifier"} <= placed.keys()
    assert all(each.endswith(" CPU") and int(each.split()[0]) > 1 for each in placed.values()), placed


@pytest.mark.gpu("recorded rounds emit what plain launches do, also after others were recorded, and nothing is recorded twice")
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_recorded_rounds_emit_what_plain_launches_do(loaded: Outrider, settings: dict[str, Any]) -> None:
    rounds = loaded.rounds
    if not rounds.recorder.enabled:
        pytest.skip("runs of ONNX Runtime are not recorded")
    rounds.recorder.enabled = False
    plain = {k: tokens(loaded, k, **settings) for k in (0, *K)}
    rounds.recorder.enabled = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a round that cannot be recorded
        for _ in range(RECORD_AT + 2):  # the last two times all is replayed, after every other shape was recorded
            assert {k: tokens(loaded, k, **settings) for k in (0, *K)} == plain
            recorded = dict(rounds.recorder.recorded)
    assert recorded == rounds.recorder.recorded
    assert {segment.shape.rows for segment in recorded} == {k + 1 for k in (0, *K)}


@pytest.mark.gpu("requests that share rounds get what they get alone, each in its own slot")
def test_batching_changes_nothing(exports: Exports, backend: dict[str, Any], tmp_path: Path) -> None:
    """In fp32 and briefly, so that no near-tie falls the other way."""
    bundle = build(exports("fp32"), tmp_path / "bundle", capacity=256, k=list(K), batch=4, **backend)
    params = [SamplingParams(max_new_tokens=20, temperature=each, seed=7) for each in (0.0, 0.8)]
    with Outrider.load(bundle) as alone:
        want = [[t for event in alone.generate(PROMPT, each, k=0) for t in event.token_ids] for each in params]
    with Outrider.load(bundle, slots=None) as batched:
        for k in (0, 4, "auto"):
            scheduler = Scheduler(batched, k=k)
            jobs = [scheduler.submit(batched.text.encode(PROMPT, chat=False), params[at % 2]) for at in range(7)]
            got: dict[int, list[int]] = {id(job): [] for job in jobs}
            while scheduler.busy:
                for job, event in scheduler.step():
                    assert isinstance(event, Event)
                    got[id(job)] += event.token_ids
            assert [got[id(job)] for job in jobs] == [want[at % 2] for at in range(7)]


@pytest.mark.gpu("a seed's answer is the same each time")
def test_answers_are_the_same_each_time(loaded: Outrider) -> None:
    for settings in SETTINGS:
        assert len({tuple(tokens(loaded, 4, **settings)) for _ in range(5)}) == 1


@pytest.mark.gpu("past and present caches are the same memory, written where the tokens stand")
def test_the_cache_is_written_in_place(loaded: Outrider) -> None:
    session = loaded.sessions["target"]
    session.clear(0)
    session.run(np.array([[5, 9, 11]]), np.array([4]))
    for values in session.cache().values():
        assert (values[:, :, 4:7] != 0).any(axis=-1).all()
        assert (values[:, :, :4] == 0).all()
        assert (values[:, :, 7:] == 0).all()


@pytest.mark.gpu("a NaN stops the request, and the next one is as if nothing had been")
def test_logits_with_nan_stop_the_request(backend: dict[str, Any], broken: Path, tmp_path: Path) -> None:
    outrider = Outrider.load(build(broken, tmp_path / "bundle", **backend))

    def answer(*prompt: int) -> list[int]:
        asked = SamplingParams(max_new_tokens=9)
        return [token for event in outrider.generate([*prompt], asked, k=4) for token in event.token_ids]

    want = answer(5, 11, 9)
    with pytest.raises(EngineError, match="contain NaN or infinity"):
        answer(5, BROKEN, 9)
    assert answer(5, 11, 9) == want


@pytest.mark.gpu("a run past the capacity is refused before anything is written")
def test_a_run_past_the_capacity_is_refused(loaded: Outrider) -> None:
    with pytest.raises(EngineError, match="does not fit"):
        loaded.sessions["target"].run(np.zeros((1, 2), dtype=np.int64), np.array([loaded.build.capacity - 1]))


@pytest.mark.gpu("loading and closing a bundle 50 times leaves no memory of the GPU behind")
def test_fifty_loads_leave_no_memory_behind(bundles: Bundles) -> None:
    """Nothing else should use the GPU meanwhile: its free memory is what is compared."""
    from outrider.engines.cuda import Cuda

    gpu, free = Cuda(), []
    for _ in range(50):
        with Outrider.load(bundles("fp16")) as outrider:
            tokens(outrider, 4, max_new_tokens=6)
        free.append(gpu.memory()[0])
    assert free[-1] >= free[4] - (16 << 20)  # the first few fill what CUDA and the libraries keep; a leaked cache is more


@pytest.mark.gpu("a capacity that the GPU has no memory for is refused with what was asked and what there is")
def test_too_large_a_cache_is_refused(bundles: Bundles) -> None:
    manifest, made = open_bundle(bundles("fp16"))
    engines = open_engines(bundles("fp16"), manifest, msgspec.structs.replace(made, capacity=1 << 40, windows=[1 << 40]))
    with pytest.raises(EngineError, match=r"no memory for a cache of .* takes .* bytes, and there are"):
        engines.session("target", batch=1)


@pytest.mark.gpu("a bundle for another GPU and a truncated plan are refused with the rebuild command")
def test_what_was_not_built_for_this_gpu_is_refused(backend: dict[str, Any], exports: Exports, tmp_path: Path) -> None:
    if backend["backend"] == "onnxruntime":
        pytest.skip("ONNX Runtime's graphs are for every GPU")
    bundle = build(exports("fp16"), tmp_path / "bundle", capacity=256, **backend)
    made = read_manifest(bundle).build
    assert made is not None
    reseal(bundle, build=msgspec.structs.replace(made, compute_capabilities=["1.0"]))
    with pytest.raises(EngineError, match=r"compute capability 1\.0; this one") as refused:
        Outrider.load(bundle)
    assert "outrider build-engine" in refused.value.hint
    plan = bundle / plan_file("target")
    plan.write_bytes(plan.read_bytes()[:1000])
    reseal(bundle, build=made)
    with pytest.raises(EngineError, match=r"is not valid|does not run here|cannot be loaded"):
        Outrider.load(bundle)


@pytest.mark.gpu("a bundle without a draft loads, and decodes the same text as the pair's target")
def test_a_bundle_without_a_draft_loads(loaded: Outrider, backend: dict[str, Any], exports: Exports, tmp_path: Path) -> None:
    with Outrider.load(build(exports("alone"), tmp_path / "bundle", capacity=256, k=list(K), **backend)) as alone:
        assert tokens(alone, 0, temperature=0.0) == tokens(loaded, 0, temperature=0.0)


@pytest.mark.gpu("the runtime takes memory and streams from CUDA's own package, not from torch")
def test_no_torch_at_run_time(bundles: Bundles) -> None:
    code = (
        "import sys; from outrider import Outrider, SamplingParams; from pathlib import Path\n"
        "list(Outrider.load(sys.argv[1]).generate('the', SamplingParams(max_new_tokens=9)))\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(bundles("fp16"))], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
