"""What the tests share: checkpoints, exports and bundles made by code."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from outrider.backends import registry
from outrider.backends.base import required_rows
from outrider.backends.tensorrt.job import BuildJob, BuildOptions
from outrider.backends.tensorrt.package import RTX
from outrider.backends.tensorrt.profiles import step_profiles
from outrider.bench.results import Results, read
from outrider.builder.build import build_engine
from outrider.bundle.folder import digest_all, read_manifest
from outrider.bundle.manifest import (
    MANIFEST,
    ROLES,
    SCHEMA_VERSION,
    TOKENIZER,
    Build,
    Cost,
    Generation,
    Manifest,
    Model,
    Parity,
)
from outrider.cli import main
from outrider.engines.contract import CONTRACT_VERSION, INPUT_IDS, LOGITS_ROWS, CacheTensor, window_buckets
from outrider.engines.session import Session
from outrider.export.graph.cache_layers import CacheLayout
from outrider.export.pair import export_pair
from outrider.export.parity import Exported
from outrider.runtime import drafters

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ROOT / "examples" / "tiny-pair"
HYBRID = ROOT / "examples" / "tiny-hybrid" / "target"
PAIR = ROOT / "tests" / "pair"  # which is smaller; see make.py there
END = "<|endoftext|>"
TEXT = ["the quick brown fox jumps over the lazy dog", "naïve café, 中文 and 🙂 emoji", "0123456789 +-*/=()"] * 20


Made_ = TypeVar("Made_")
COMMAND = [sys.executable, "-m", "outrider"]


class Made(dict[str, Made_]):
    """Values that are made when they are first asked for."""

    def __init__(self, make: Callable[[str], Made_]):
        super().__init__()
        self._make = make

    def __missing__(self, name: str) -> Made_:
        self[name] = self._make(name)
        return self[name]


def run(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, **options)


def run_here(*arguments: str | Path, input: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, which has imported what it needs already."""
    with warnings.catch_warnings():  # a command changes how they are shown
        done = CliRunner().invoke(main, [*map(str, arguments)], input=input)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception  # a process would end with a traceback
    return subprocess.CompletedProcess([], done.exit_code, done.stdout, done.stderr)


@contextmanager
def full_disk(most: int) -> Iterator[None]:
    """Let no file that this process writes grow beyond a size in bytes, so that a write fails halfway, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Fused(Exported):
    """A graph after `fuse`; each run gives the logits of all its rows, or of the last `most` of them."""

    def __init__(self, path: Path, layout: CacheLayout, precision: str, most: int = 2**31):
        super().__init__(path, layout, precision)
        self.session, session = self, self.session
        self.run = lambda names, inputs: session.run(
            names, inputs | {LOGITS_ROWS: np.array([min(most, inputs[INPUT_IDS].shape[1])])}
        )


def tokenizer(vocab_size: int = 320) -> Tokenizer:
    """A small byte-level BPE with one special token, id 0."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    )
    return made


def sentencepiece() -> Tokenizer:
    """A tokenizer of the kind that has spaces in its tokens, one for each byte, and drops the space that begins a text."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"abcdefghijklmnopqrstuvwxyz\u2581"]
    vocabulary = {word: index for index, word in enumerate([*words, "\u2581a", "\u2581b", "\u2581c"])}
    merges = [("\u2581", letter) for letter in "abc"]
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    strip = decoders.Strip(" ", 1, 0)
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    made.add_special_tokens(["<s>"])
    return made


def write_checkpoint(folder: Path, model: PreTrainedModel, made: Tokenizer | None = None, **settings: Any) -> Path:
    """A Hugging Face folder with `model` and a tokenizer."""
    model.save_pretrained(folder)
    (made or tokenizer()).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def llama(seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """A tiny random Llama."""
    torch.manual_seed(seed)
    options = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(**(options | overrides))).eval()


def build(source: Path, output: Path, **overrides: Any) -> Path:
    """A bundle of the export `source`, with ready-made costs where it must have some; `measured=None` measures them."""
    options: dict[str, Any] = {"backend": "onnxruntime", "k": [1, 2, 4, 8], "capacity": 160, "batch": 1, "max_prompt_chunk": 16}
    options |= {"backend": "auto"} if "stage_backends" in overrides else {}
    options |= overrides
    possible = min([*options["k"], options["batch"]], default=0) > 0
    last = options.get("stage_backends", [options["backend"]])[-1]
    if "measured" not in options and possible and last in registry.names() and registry.get(last).requires_costs:
        options["measured"] = ready_made(read_manifest(source), options)
    build_engine(source, output, **options)
    return output


def ready_made(manifest: Manifest, options: Mapping[str, Any]) -> Build:
    """A build with costs and acceptance as a CPU has them: a further row or sequence takes little beside the weights."""
    k, capacity, chunk = sorted({*options["k"]}), options["capacity"], options["max_prompt_chunk"]
    sizes: dict[str, Any] = {"k": k, "capacity": capacity, "batch": options["batch"], "max_prompt_chunk": chunk}
    empty = Build(backend="", backend_version="", device="", windows=window_buckets(capacity), **sizes)

    def cost(name: str, rows: int, window: int, batch: int) -> Cost:
        model = manifest.models.get(name)
        share = 0.02 if model is None else model.parameters / manifest.models["target"].parameters
        took = round(share * (1 + 0.03 * (rows - 1)) * (1 + 0.1 * (batch - 1)) * (1 + window / 4096), 4)
        return Cost(rows=rows, window=window, batch=batch, median=took, fastest=took, slowest=took, runs=1)

    on_device = drafters.on_device(drafters.available(manifest))
    batches = sorted({*(2**power for power in range(empty.batch.bit_length())), empty.batch})
    costs = {}
    for name in manifest.engines:
        k_rows = required_rows(name, empty)
        rows = k_rows | ({chunk} if name in ROLES else set())
        windows = empty.windows if name in ROLES else [0]
        of_chunks = [window for window in windows if window >= chunk]  # a chunk is measured in the smallest and the largest
        places = [
            (n, at)
            for n in sorted(rows)
            for at in windows
            if n <= (at or n) and (n in k_rows or at in (of_chunks[0], of_chunks[-1]))
        ]
        costs[name] = [cost(name, *place, batch) for batch in batches for place in places]
    return msgspec.structs.replace(empty, costs=costs, acceptance=dict.fromkeys(on_device, 0.6))


def rtx_job(graph: Path, cache: list[CacheTensor], role: str = "target") -> BuildJob:
    """The build of a step model's plan with TensorRT-RTX, with every profile."""
    profiles = step_profiles([4], 128, 1, 16, role, not all(each.positional for each in cache))
    sizes: dict[str, Any] = {"cache": cache, "capacity": 128, "recent": 8, "profiles": profiles}
    return BuildJob(package=RTX, options=BuildOptions(), graph=str(graph), plan=str(graph.with_suffix(".plan")), **sizes)


def bench_once(bundle: Path, prompt: str, folder: Path) -> Results:
    """The report in `folder` of a short run of `outrider bench` over one prompt."""
    (folder / "one.jsonl").write_text(json.dumps({"workload": "support", "prompt": prompt}))
    few = ["--workload", folder / "one.jsonl", "--rounds", "1", "--max-new-tokens", "16", "--report", folder / "report"]
    done = run_here("bench", bundle, *map(str, few))
    assert done.returncode == 0, done.stderr
    return read(folder / "report" / "bench.json")


def reseal(folder: Path, **changes: Any) -> None:
    """Make the manifest true again after a test has edited the folder, with `changes` to its fields."""
    manifest = msgspec.structs.replace(read_manifest(folder), files=digest_all(folder), **changes)
    (folder / MANIFEST).write_bytes(manifest.encode())


def make_endless(bundle: Path) -> None:
    """Let no token end the bundle's texts."""
    reseal(bundle, generation=msgspec.structs.replace(read_manifest(bundle).generation, eos_token_ids=[]))


def sealed_bundle(folder: Path) -> Path:
    """A bundle of a target and a draft whose files hold their names: for what opens no engine."""
    parity = Parity(rows=1, max_abs_diff=0.0, tolerance=1.0, argmax_agreement=1.0)
    sizes: dict[str, Any] = {"parameters": 1, "precision": "fp32", "vocab_rows": 320, "max_positions": 256}
    models = {
        role: Model(source=f"a/{role}", architecture="Llama", layers=[(2, 8, 8)], parity=parity, **sizes)
        for role in ("target", "draft")
    }
    made = Manifest(
        schema_version=SCHEMA_VERSION,
        contract_version=CONTRACT_VERSION,
        outrider_version="0",
        vocab_tokens=320,
        models=models,
        generation=Generation(eos_token_ids=[0], special_tokens={}),
        files={},
    )
    build = Build(
        backend=registry.REFERENCE.name,
        backend_version="0",
        device="cpu",
        k=[1, 2],
        capacity=128,
        batch=1,
        max_prompt_chunk=16,
        windows=window_buckets(128),
    )
    costs = {
        name: [
            Cost(rows=rows, window=window, batch=1, median=2.0, fastest=1.0, slowest=3.0, runs=7)
            for window in (build.windows if name in ROLES else [0])
            for rows in required_rows(name, build)
        ]
        for name in made.engines
    }
    for name in (TOKENIZER, *(each for engine in made.engines for each in registry.REFERENCE.engine_files(engine))):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    sealed = msgspec.structs.replace(
        made, build=msgspec.structs.replace(build, costs=costs, acceptance={"model": 0.5}), files=digest_all(folder)
    )
    (folder / MANIFEST).write_bytes(sealed.encode())
    return folder


def prefill(session: Session, tokens: list[int], chunk: int) -> None:
    """Write the cache entries of `tokens`, from the first slot on, at most `chunk` rows a run."""
    for at in range(0, len(tokens), chunk):
        session.write(np.array([tokens[at : at + chunk]], dtype=np.int64), np.array([at], dtype=np.int64))


BROKEN = 77  # a token
BROKEN_TEXT = "a"


def broken_export(export: Path) -> None:
    """An export whose target has NaN embeddings of two tokens, put there after the export's own check."""
    model = llama(tie_word_embeddings=False)
    checkpoint = str(write_checkpoint(export.with_name("broken-checkpoint"), model))
    export_pair(checkpoint, checkpoint, export, precision="fp32")
    weights = export / "target" / "model.onnx.data"
    data = weights.read_bytes()
    for token in (BROKEN, *tokenizer().encode(BROKEN_TEXT).ids):
        row = model.model.embed_tokens.weight[token].detach().numpy()
        assert data.count(row.tobytes()) == 1
        data = data.replace(row.tobytes(), np.full_like(row, np.nan).tobytes())
    weights.write_bytes(data)
    reseal(export)
