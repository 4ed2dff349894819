"""ONNX Runtime GenAI, with models from its own builder."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from outrider.experiments.compare_cpu.common import (
    THREADS,
    AnswerFunction,
    Arrivals,
    Job,
    PairFiles,
    make_once,
    package_version,
    run,
)
from outrider.experiments.compare_cpu.peers.transformers import prepare as prepare_transformers

NAME, WEIGHTS = "ONNX Runtime GenAI", "int4 by its own builder"
SETTINGS: list[Job] = [{"threads": THREADS, "spinning": spinning, "k": [0, 3]} for spinning in (False, True)]
TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "chat", "special", "added")


version = partial(package_version, "onnxruntime-genai")


def prepare(folder: Path, pair: PairFiles) -> Job:
    """Build both models from the transformers checkpoints, and a folder that combines them for speculative decoding."""
    checkpoints = Path(prepare_transformers(folder, pair)["folder"])

    def build(path: Path) -> None:
        for role in PairFiles._fields:
            builder = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
            run(*builder, "-i", checkpoints / role, "-o", path / role, "-p", "int4", "-e", "cpu", "-c", folder / "cache")
        _join(path)

    return {"folder": str(make_once(folder / "genai", build))}


def _join(path: Path) -> None:
    """Create the folder `pair` with hard links to both models and a common configuration."""
    pair = path / "pair"
    pair.mkdir()
    configs = {role: json.loads((path / role / "genai_config.json").read_text()) for role in PairFiles._fields}
    for role in PairFiles._fields:
        for file in (path / role).iterdir():
            if role == "target" and file.name.startswith(TOKENIZER_FILES):
                (pair / file.name).write_bytes(file.read_bytes())
            elif file.name.startswith("model.onnx"):
                link = pair / role / file.name
                link.parent.mkdir(exist_ok=True)
                link.hardlink_to(file)
        configs[role]["model"]["decoder"]["filename"] = f"{role}/model.onnx"
    config = configs["target"]
    config["model"] |= {"type": "speculative", "draft": configs["draft"]["model"]["decoder"]}
    (pair / "genai_config.json").write_text(json.dumps(config))


def load(job: Job) -> AnswerFunction:
    """Load the target alone or the pair on first use, depending on k."""
    import onnxruntime_genai as og

    models: dict[bool, Any] = {}

    def model(speculative: bool) -> Any:
        if speculative not in models:
            models.clear()  # one in memory at a time
            models[speculative] = og.Model(_config(job, speculative))
        return models[speculative]

    def answer(ids: list[int], tokens: int, k: int) -> tuple[Arrivals, float | None]:
        params = og.GeneratorParams(model(k != 0))
        length = len(ids) + tokens
        params.set_search_options(do_sample=False, max_length=length, min_length=length)
        if k:
            params.set_speculative_options(max_draft_tokens=k)
        started, arrivals = time.perf_counter(), list[tuple[float, int]]()
        generator = og.Generator(model(k != 0), params)
        generator.append_tokens(ids)
        while len(arrivals) < tokens and not generator.is_done():
            generator.generate_next_token()
            arrivals.append((time.perf_counter() - started, 1))
        return arrivals, None if k == 0 else generator.get_speculative_stats()["mean_emitted_tokens_per_round"]

    return answer


def _config(job: Job, speculative: bool) -> Any:
    import onnxruntime_genai as og

    config = og.Config(str(Path(job["folder"]) / ("pair" if speculative else "target")))
    spinning = str(int(job["spinning"]))
    options = {"intra_op_num_threads": job["threads"], "session.intra_op.allow_spinning": spinning}
    overlay: dict[str, Any] = {"decoder": {"session_options": options}}
    if speculative:
        overlay["draft"] = {"session_options": options}
    config.overlay(json.dumps({"model": overlay}))
    return config
