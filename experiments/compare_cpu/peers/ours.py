"""Outrider."""

from __future__ import annotations

import hashlib
import sys
import time
from functools import partial
from pathlib import Path

from outrider.experiments.compare_cpu.common import (
    CONTEXT,
    AnswerFunction,
    Arrivals,
    Job,
    K,
    PairFiles,
    make_once,
    package_version,
    run,
)

NAME = "Outrider"
AUTO = "auto"  # k and drafter chosen every round
# Options of `outrider export` and of `outrider build-engine`.
VARIANTS: dict[str, tuple[list[str], list[str]]] = {
    "int4": (["int4"], ["--backend", "onnxruntime"]),
    "int4-head": (["int4", "--head-precision", "int4"], ["--backend", "onnxruntime"]),
    "int8": (["int8"], ["--backend", "onnxruntime"]),
    "openvino-int4": (["int4"], ["--backend", "openvino"]),
    **{f"openvino-int4-{group}": (["int4", "--group-size", group], ["--backend", "openvino"]) for group in ("64", "128")},
    "openvino-int8": (["int8", "--group-size", "128"], ["--backend", "openvino"]),
}


version = partial(package_version, "outrider")


def prepare(folder: Path, pair: PairFiles, variant: str) -> Job:
    """Export and build the pair in one of `VARIANTS`."""
    precision_options, backend = VARIANTS[variant]
    outrider = Path(sys.executable).with_name("outrider")

    def export(path: Path) -> None:
        models = ["--target", pair.target, "--draft", pair.draft]
        run(outrider, "export", *models, "-o", path, "--precision", *precision_options)

    def build(path: Path) -> None:
        k = ",".join(map(str, K))
        run(outrider, "build-engine", source, "-o", path, "--k", k, "--capacity", CONTEXT, *backend)

    source = make_once(folder / f"onnx-{' '.join(precision_options)}", export)
    bundle = make_once(folder / f"bundle-{variant}", build)
    manifest = hashlib.sha256((bundle / "manifest.json").read_bytes()).hexdigest()  # a rebuilt bundle makes a new job
    return {"bundle": str(bundle), "manifest": manifest}


def load(job: Job) -> AnswerFunction:
    """Load a bundle, and let it generate past end-of-text tokens."""
    import msgspec

    from outrider import Outrider, SamplingParams

    outrider = Outrider.load(job["bundle"])
    generation = msgspec.structs.replace(outrider.manifest.generation, eos_token_ids=[])
    outrider.manifest = msgspec.structs.replace(outrider.manifest, generation=generation)

    def answer(ids: list[int], tokens: int, k: int | str) -> tuple[Arrivals, float | None]:
        started = time.perf_counter()
        events = outrider.generate(ids, SamplingParams(max_new_tokens=tokens), k=k)
        return [(time.perf_counter() - started, len(event.token_ids)) for event in events], None

    return answer


def encode(job: Job, prompts: list[str]) -> list[list[int]]:
    """Return the token ids of each prompt in the chat template."""
    from outrider.backends.open import open_bundle
    from outrider.runtime.text.text import Text

    bundle = Path(job["bundle"])
    text = Text.load(bundle, open_bundle(bundle)[0])
    return [text.encode(prompt, chat=True) for prompt in prompts]
