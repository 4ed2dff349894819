"""Outrider."""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

from outrider.scripts.compare_cpu.common import CONTEXT, Answer, Arrivals, Job, K, Pair, make_once, run

NAME, PACKAGE = "Outrider", "outrider"
AUTO = "auto"  # k and drafter chosen every round
PRECISIONS = {"int4": ["int4"], "int4-head": ["int4", "--head-precision", "int4"], "int8": ["int8"]}  # for `outrider export`


def prepare(folder: Path, pair: Pair, precision: str) -> Job:
    """Export and build the pair."""
    outrider = Path(sys.executable).with_name("outrider")

    def export(path: Path) -> None:
        models = ["--target", pair.target, "--draft", pair.draft]
        run(outrider, "export", *models, "-o", path, "--precision", *PRECISIONS[precision])

    def build(path: Path) -> None:
        source, k = folder / f"onnx-{precision}", ",".join(map(str, K))
        run(outrider, "build-engine", source, "-o", path, "--k", k, "--capacity", CONTEXT)

    make_once(folder / f"onnx-{precision}", export)
    bundle = make_once(folder / f"bundle-{precision}", build)
    manifest = hashlib.sha256((bundle / "manifest.json").read_bytes()).hexdigest()  # another bundle is another job
    return {"bundle": str(bundle), "manifest": manifest}


def load(job: Job) -> Answer:
    """Load a bundle that ignores the end of the text."""
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
    from outrider.runtime.text import Text

    bundle = Path(job["bundle"])
    text = Text.load(bundle, open_bundle(bundle)[0])
    return [text.encode(prompt, chat=True) for prompt in prompts]
