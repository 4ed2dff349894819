"""How fast plain and speculative decoding are: with each backend, with transformers, and of a large pair."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from outrider import Outrider, SamplingParams
from outrider.backends.tensorrt.package import RTX
from outrider.runtime.rounds.buffers import Lane, Shape
from outrider.runtime.rounds.launches import Launches
from outrider.runtime.rounds.rounds import RoundResult
from outrider.tests.deferred import deferred
from outrider.tests.gpu.exports import build, command
from outrider.tests.support import SHIPPED, write_checkpoint

PROMPT = "Customer: Hi, I would like to book a table for two in San Jose.\nAgent:"
TOKENS = 256
REPEATS = 5
TEMPERATURES = 0.0, 0.8
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
ACCEPTANCE = 0.8  # of the large pair, whose random weights would never agree
HOUR = 3600
SIZES = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
SHAPES = {"target": (3584, 18944, 28, 28, 4), "draft": (896, 4864, 24, 14, 2)}  # of Qwen2.5 7B and 0.5B

Record = Callable[[str, object], None]
Figures = tuple[float, float, float]  # seconds per round, tokens per second, mean acceptance length


def time_text(loaded: Outrider, prompt: str, k: int, temperature: float) -> Figures:
    """Time one text."""
    stats = None
    for event in loaded.generate(prompt, SamplingParams(max_new_tokens=TOKENS, temperature=temperature, seed=0), k=k):
        stats = event.stats
    assert stats is not None
    seconds = stats.seconds - stats.prompt_seconds
    return seconds / stats.rounds, stats.emitted / seconds, stats.mean_acceptance_length


def bytes_per_round(loaded: Outrider, k: int) -> int:
    """Return the bytes that a round must read: the weights of each pass, and the caches up to the middle of the text.

    An input embedding that is not shared with the head is counted in full, though a pass reads only a few of its rows (7% of
    a 7B model).
    """
    total = 0
    for role, passes in (("target", 1), ("draft", k)):
        model = loaded.manifest.models[role]
        cached = sum(heads * (key + value) for heads, key, value in model.layers) * TOKENS // 2
        total += passes * (model.parameters + cached) * BYTES[model.precision]
    return total


def time_bundle(record: Record, name: str, loaded: Outrider, prompt: str, bandwidth: float) -> None:
    """Time plain decoding and every k, greedy and sampled, alternating, and record the medians.

    A backend that records rounds is timed both recorded and as plain launches. `bandwidth` is the GPU's, in GB/s.
    """
    recordings = (True, False) if loaded.rounds.recorder.enabled else (False,)
    variants = list(itertools.product(TEMPERATURES, (0, *loaded.build.k), recordings))
    results: dict[tuple[float, int, bool], list[Figures]] = {variant: [] for variant in variants}
    for _ in range(REPEATS + 1):  # the first is a warm-up
        for temperature, k, recorded in variants:
            loaded.rounds.recorder.enabled = recorded
            results[temperature, k, recorded].append(time_text(loaded, prompt, k, temperature))
    for (temperature, k, recorded), runs in results.items():
        plain = statistics.median(speed for _, speed, _ in results[temperature, 0, recordings[0]][1:])
        seconds, speeds, lengths = zip(*runs[1:], strict=True)
        row = {"backend": name, "temperature": temperature, "k": k, "rounds": "recorded" if recorded else "launches"}
        row |= _speed([*speeds], plain)
        row["ms per round"] = f"{1e3 * statistics.median(seconds):.3f}"
        row["ms to read its bytes"] = f"{bytes_per_round(loaded, k) / bandwidth / 1e6:.3f}"
        row["mean acceptance length"] = f"{statistics.median(lengths):.2f}"
        record("timing", row)
    loaded.close()


def _speed(speeds: list[float], plain: float) -> dict[str, str]:
    median = statistics.median(speeds)
    return {"tokens/s": f"{median:.0f} ({min(speeds):.0f}-{max(speeds):.0f})", "over plain": f"{median / plain:.2f}"}


def time_transformers(record: Record, pair: Path, device: str) -> None:
    """Time plain and assisted generation of a pair with transformers, and record the medians."""
    target, draft = (
        AutoModelForCausalLM.from_pretrained(pair / role, dtype=torch.float16).to(device).eval() for role in ("target", "draft")
    )
    inputs = AutoTokenizer.from_pretrained(pair / "target")(PROMPT, return_tensors="pt").to(device)
    speeds: dict[str, list[float]] = {"plain": [], "assisted": []}
    for _ in range(REPEATS + 1):  # the first is a warm-up
        for name, options in (("plain", {}), ("assisted", {"assistant_model": draft})):
            torch.cuda.synchronize()
            started = time.perf_counter()
            text = target.generate(**inputs, do_sample=False, max_new_tokens=TOKENS, pad_token_id=0, **options)
            torch.cuda.synchronize()
            speeds[name].append((text.shape[1] - inputs.input_ids.shape[1]) / (time.perf_counter() - started))
    plain = statistics.median(speeds["plain"][1:])
    for name, values in speeds.items():
        record("timing", {"backend": "transformers", "temperature": 0.0, "k": name} | _speed(values[1:], plain))


class ForcedAcceptance:
    """An observer of rounds that accepts draft tokens at random, to time a pair that would never agree.

    Only for these timings: what it emits is the text of no model.
    """

    def __init__(self, rate: float):
        """Accept each draft token with probability `rate`."""
        self._rate, self._random = rate, np.random.default_rng(0)

    def __call__(self, launches: Launches, shape: Shape, index: int, lane: Lane, result: RoundResult) -> RoundResult:
        rejected = np.flatnonzero(self._random.random(len(result.drafted)) >= self._rate)
        accepted = int(rejected[0]) if len(rejected) else len(result.drafted)
        return result._replace(tokens=[*result.drafted[:accepted], result.tokens[-1]])


def write_large_pair(folder: Path, device: str) -> None:
    """Write the checkpoints `target` and `draft` in fp16, with random weights and the tokenizer of the shipped pair."""
    made = Tokenizer.from_file(str(SHIPPED / "target" / "tokenizer.json"))
    for role, shape in SHAPES.items():
        config = Qwen2Config(
            vocab_size=152064,
            max_position_embeddings=4096,
            tie_word_embeddings=role == "draft",
            bos_token_id=None,
            eos_token_id=None,
            **dict(zip(SIZES, shape, strict=True)),
        )
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float16)
        write_checkpoint(folder / role, model.cpu(), made)
        del model
        torch.cuda.empty_cache()


@pytest.fixture
def bandwidth(record_property: Record) -> float:
    """Return the GB/s of a copy within the GPU's memory."""
    from outrider.engines.cuda import Cuda  # which needs a package that other machines lack
    from outrider.tests.gpu import hardware

    measured = hardware.bandwidth(Cuda())
    record_property("copy bandwidth, GB/s", measured)
    return measured


@pytest.mark.gpu("plain and speculative decoding can be timed")
@pytest.mark.filterwarnings("default")
def test_speed(backend: dict[str, Any], bundles: Callable[..., Path], bandwidth: float, record_property: Record) -> None:
    time_bundle(record_property, backend["backend"], Outrider.load(bundles("fp16")), PROMPT, bandwidth)


@pytest.mark.gpu("transformers can be timed with the same checkpoints")
@pytest.mark.filterwarnings("default")
def test_speed_of_transformers(record_property: Record) -> None:
    time_transformers(record_property, SHIPPED, "cuda")


@pytest.mark.gpu("a pair in the shape of 7B and 0.5B can be timed", limit=3 * HOUR)
@pytest.mark.filterwarnings("default")
def test_speed_of_a_large_pair(
    request: pytest.FixtureRequest, bandwidth: float, tmp_path: Path, record_property: Record
) -> None:
    """Time it with the fastest backend of this GPU. Building takes 60 GB of memory, and 60 GB of disk."""
    from outrider.engines.cuda import Cuda

    if not request.config.getoption("--large-pair"):
        pytest.skip("takes 60 GB of memory and of disk: --large-pair runs it")
    ready = request.config.getoption("--exports")
    source = ready / "large" if ready and (ready / "large").exists() else tmp_path / "onnx"
    if not source.exists():
        write_large_pair(tmp_path, "cuda")
        checkpoints = "--target", tmp_path / "target", "--draft", tmp_path / "draft"
        command("export", *checkpoints, "--precision", "fp16", "-o", source, timeout=HOUR)
    chosen = {"backend": RTX.backend}
    if RTX.unsupported(Cuda().compute_capability) is not None:
        chosen = {"backend": "onnxruntime", "device": "cuda"}
    build(source, tmp_path / "bundle", chosen, timeout=HOUR)
    loaded = Outrider.load(tmp_path / "bundle").observed(ForcedAcceptance(ACCEPTANCE))
    name = f"{chosen['backend']}, acceptance forced to {ACCEPTANCE}"
    time_bundle(record_property, name, loaded, "the quick brown fox", bandwidth)


def test_timing_on_a_simulated_gpu(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "TOKENS", 31)
    monkeypatch.setitem(globals(), "REPEATS", 1)
    monkeypatch.setitem(globals(), "TEMPERATURES", (0.0,))
    rows: list[Any] = []
    loaded = deferred(tiny_bundle).observed(ForcedAcceptance(1))
    time_bundle(lambda _, row: rows.append(row), "simulated", loaded, "the quick", 100)
    assert [(row["k"], row["rounds"]) for row in rows] == [
        (k, how) for k in (0, 1, 2, 4, 8) for how in ("recorded", "launches")
    ]
    assert [float(row["mean acceptance length"]) for row in rows[::2]] == [1, 2, 3, 5, 7.5]
