"""Timing of plain and speculative decoding, recorded and as plain launches, and of transformers."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import numpy as np

from outrider import Outrider, SamplingParams
from outrider.runtime.rounds.buffers import Lane, Shape
from outrider.runtime.rounds.launches import Launches
from outrider.runtime.rounds.rounds import RoundResult
from outrider.scripts.gpu_check.report import Report

TOKENS = 256
REPEATS = 5
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}

Figures = tuple[float, float, float]  # seconds per round, tokens per second, mean acceptance length


def time_text(loaded: Outrider, prompt: str, k: int) -> Figures:
    """Time one greedy text."""
    stats = None
    for event in loaded.generate(prompt, SamplingParams(max_new_tokens=TOKENS), k=k):
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


def time_bundle(report: Report, name: str, loaded: Outrider, prompt: str, rate: float | None) -> str:
    """Time plain decoding and every k, alternating, and add the medians to the report.

    A backend that records rounds is timed both recorded and as plain launches. `rate` is the GPU's copy bandwidth in GB/s.
    """
    recordings = (True, False) if loaded.rounds.recorder.enabled else (False,)
    variants = [(k, record) for k in (0, *loaded.build.k) for record in recordings]
    results: dict[tuple[int, bool], list[Figures]] = {variant: [] for variant in variants}
    for _ in range(REPEATS + 1):  # the first is a warm-up
        for k, record in variants:
            loaded.rounds.recorder.enabled = record
            results[k, record].append(time_text(loaded, prompt, k))
    plain = statistics.median(speed for _, speed, _ in results[variants[0]][1:])
    for (k, record), runs in results.items():
        bound = bytes_per_round(loaded, k) / (rate * 1e9) if rate else None
        rounds = "recorded" if record else "launches"
        report.timings.append({"backend": name, "k": k, "rounds": rounds} | _row(runs[1:], plain, bound))
    loaded.close()
    return f"plain {plain:.0f} tokens/s"


def _row(runs: list[Figures], plain: float, bound: float | None) -> dict[str, str]:
    seconds, speeds, lengths = zip(*runs, strict=True)
    return {
        "tokens/s": f"{statistics.median(speeds):.0f} ({min(speeds):.0f}-{max(speeds):.0f})",
        "over plain": f"{statistics.median(speeds) / plain:.2f}",
        "ms per round": f"{1e3 * statistics.median(seconds):.3f}",
        "ms to read its bytes": f"{1e3 * bound:.3f}" if bound else "-",
        "mean acceptance length": f"{statistics.median(lengths):.2f}",
    }


def time_transformers(report: Report, pair: Path, prompt: str) -> str:
    """Time plain and assisted generation of the same checkpoints with transformers, and add the medians to the report."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target, draft = (
        AutoModelForCausalLM.from_pretrained(pair / role, dtype=torch.float16).to("cuda").eval() for role in ("target", "draft")
    )
    inputs = AutoTokenizer.from_pretrained(pair / "target")(prompt, return_tensors="pt").to("cuda")
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
        unknown = dict.fromkeys(("ms per round", "ms to read its bytes", "mean acceptance length"), "-")
        row = _row([(1.0, speed, 1.0) for speed in values[1:]], plain, None) | unknown
        report.timings.append({"backend": "transformers", "k": name, "rounds": "-"} | row)
    return f"plain {plain:.0f} tokens/s"


class ForcedAcceptance:
    """An observer of rounds that accepts draft tokens at random, to time a pair that would never agree.

    Only for this script: what it emits is the text of no model.
    """

    def __init__(self, rate: float):
        """Accept each draft token with probability `rate`."""
        self._rate, self._random = rate, np.random.default_rng(0)

    def __call__(self, launches: Launches, shape: Shape, index: int, lane: Lane, result: RoundResult) -> RoundResult:
        rejected = np.flatnonzero(self._random.random(len(result.drafted)) >= self._rate)
        accepted = int(rejected[0]) if len(rejected) else len(result.drafted)
        return result._replace(tokens=[*result.drafted[:accepted], result.tokens[-1]])
