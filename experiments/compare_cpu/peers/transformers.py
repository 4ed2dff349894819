"""Transformers, plain."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

from outrider.experiments.compare_cpu.common import AnswerFunction, Arrivals, Job, PairFiles, make_once, package_version

NAME, WEIGHTS = "transformers", "bf16"
SETTINGS: list[Job] = [{"k": [0]}]  # one thread per core; drafting is far slower than with the other programs at every k

version = partial(package_version, "transformers")


def prepare(folder: Path, pair: PairFiles) -> Job:
    """Dequantize the GGUF files into Hugging Face folders in bf16."""

    def unpack(path: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        for role, file in pair._asdict().items():
            options = {"gguf_file": file.name}
            model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.bfloat16, **options)
            model.hf_quantizer = None  # the dequantized model is no longer a GGUF
            model.config.__dict__.pop("quantization_config", None)
            model.save_pretrained(path / role)
            AutoTokenizer.from_pretrained(file.parent, **options).save_pretrained(path / role)

    return {"folder": str(make_once(folder / "transformers", unpack))}


class TokenStreamer:
    """A streamer that records when transformers delivers the tokens of each pass."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.arrivals: Arrivals = []
        self._is_prompt = True  # the first call brings the prompt

    def put(self, value: Any) -> None:
        if not self._is_prompt:
            self.arrivals.append((time.perf_counter() - self.started, value.numel()))
        self._is_prompt = False

    def end(self) -> None:
        pass


def load(job: Job) -> AnswerFunction:
    """Load the target."""
    import torch
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(Path(job["folder"]) / "target", dtype=torch.bfloat16)
    target.generation_config.eos_token_id = None
    target.generation_config.repetition_penalty = 1.0

    def answer(ids: list[int], tokens: int, k: int) -> tuple[Arrivals, float | None]:
        streamer, prompt = TokenStreamer(), torch.tensor([ids])
        options = {"do_sample": False, "max_new_tokens": tokens, "streamer": streamer, "pad_token_id": 0}
        target.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        return streamer.arrivals, None

    return answer
