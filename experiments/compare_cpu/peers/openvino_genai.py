"""OpenVINO GenAI, with models from `optimum-cli`: plain, with the draft model, and with prompt lookup."""

from __future__ import annotations

import time
import venv
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

NAME, WEIGHTS = "OpenVINO GenAI", "int4 by optimum-cli"
GROUPS = (128, 64)
LOOKUP = "lookup 3"
SETTINGS: list[Job] = [
    {"threads": THREADS, "group": group, "hint": "f32", "k": [k]} for group in GROUPS for k in (0, 1, 2, 3, 4, LOOKUP)
]
CONVERTER = ["optimum-intel[openvino]", "nncf"]  # in a separate environment, because it needs older transformers


version = partial(package_version, "openvino-genai")


def prepare(folder: Path, pair: PairFiles) -> Job:
    """Convert both models from the transformers checkpoints, once for each group size."""
    checkpoints = Path(prepare_transformers(folder, pair)["folder"])

    def install(path: Path) -> None:
        venv.create(path, with_pip=True)
        run(path / "bin" / "python", "-m", "pip", "install", "-q", f"torch=={_installed_torch()}", *CONVERTER)

    def convert(group: int, path: Path) -> None:
        python = make_once(folder / "optimum", install) / "bin" / "python"
        optimum = [python, "-m", "optimum.commands.optimum_cli"]  # not the script: it has the folder's path before the rename
        for role in PairFiles._fields:
            kind = ["--task", "text-generation-with-past", "--weight-format", "int4", "--group-size", group, "--ratio", "1.0"]
            run(*optimum, "export", "openvino", "-m", checkpoints / role, *kind, path / role)

    for group in GROUPS:
        make_once(folder / f"openvino-genai-{group}", partial(convert, group))
    return {"folder": str(folder / f"openvino-genai-{GROUPS[0]}")}


def _installed_torch() -> str:
    import torch

    return str(torch.__version__).split("+")[0]


def load(job: Job) -> AnswerFunction:
    """Load the pipeline for the job's only k, because a pipeline cannot change its drafter."""
    import numpy as np
    import openvino
    import openvino_genai

    (k,) = job["k"]
    folder = Path(job["folder"]).with_name(f"openvino-genai-{job['group']}")
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": job["threads"], "INFERENCE_PRECISION_HINT": job["hint"]}
    options: dict[str, Any] = {}
    if k == LOOKUP:
        options = {"prompt_lookup": True}
    elif k:
        options = {"draft_model": openvino_genai.draft_model(folder / "draft", "CPU", **properties)}
    pipeline = openvino_genai.LLMPipeline(folder / "target", "CPU", **properties, **options)

    class ArrivalStreamer(openvino_genai.StreamerBase):  # type: ignore[misc]  # the package may not be installed
        def __init__(self) -> None:
            super().__init__()
            self.arrivals: Arrivals = []
            self.started = time.perf_counter()

        def write(self, token: Any) -> Any:
            self.arrivals.append((time.perf_counter() - self.started, len(token) if isinstance(token, list) else 1))
            return openvino_genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    def answer(ids: list[int], tokens: int, k: int | str) -> tuple[Arrivals, float | None]:
        config = openvino_genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        if k == LOOKUP:
            config.num_assistant_tokens, config.max_ngram_size = int(LOOKUP.split()[1]), 3
        elif k:
            config.num_assistant_tokens = int(k)
        streamer = ArrivalStreamer()
        pipeline.generate(openvino.Tensor(np.array([ids])), config, streamer)
        return streamer.arrivals, None

    return answer
