"""Transformers, with the draft as its assistant model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from outrider.scripts.compare_cpu.common import Answer, Arrivals, Job, Pair, make_once

NAME, PACKAGE, WEIGHTS = "transformers", "transformers", "bf16"
SETTINGS: list[Job] = [{"k": [0, 1, 2, 3, 4]}]  # its default is one thread per core
DEFAULTS: list[Job] = [{"k": [0, None]}]


def prepare(folder: Path, pair: Pair) -> Job:
    """Dequantize the GGUF files into Hugging Face folders of bf16."""

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


class Clock:
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


def load(job: Job) -> Answer:
    """Load both models."""
    import torch
    from transformers import AutoModelForCausalLM

    target, draft = (
        AutoModelForCausalLM.from_pretrained(Path(job["folder"]) / role, dtype=torch.bfloat16) for role in ("target", "draft")
    )
    for model in (target, draft):
        model.generation_config.eos_token_id = None
        model.generation_config.repetition_penalty = 1.0
    default_k = draft.generation_config.num_assistant_tokens

    def answer(ids: list[int], tokens: int, k: int | None) -> tuple[Arrivals, float | None]:
        clock = Clock()
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": tokens, "streamer": clock}
        if k != 0:
            draft.generation_config.num_assistant_tokens = default_k if k is None else k
            if k is not None:
                draft.generation_config.num_assistant_tokens_schedule = "constant"
                draft.generation_config.assistant_confidence_threshold = 0.0
            options["assistant_model"] = draft
        prompt = torch.tensor([ids])
        target.generate(prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0, **options)
        return clock.arrivals, None

    return answer
