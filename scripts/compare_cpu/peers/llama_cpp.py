"""llama.cpp, through its Python package, on the GGUF files.

The package drafts by looking up the prompt, 10 tokens by default. This module adds drafting with a model.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from outrider.scripts.compare_cpu.common import CONTEXT, THREADS, Answer, Arrivals, Job, Pair

NAME, PACKAGE, WEIGHTS = "llama.cpp", "llama-cpp-python", "the GGUF files"
# One process each, because the package stores different logits when it drafts.
SETTINGS: list[Job] = [{"threads": THREADS, "k": [k]} for k in (0, 1, 2, 3, 4, 8, "lookup 2", "lookup 10")]
DEFAULTS: list[Job] = [{"k": [0]}, {"k": ["lookup 10"]}]


def prepare(folder: Path, pair: Pair) -> Job:
    """Do nothing: the GGUF files run as they are."""
    return {role: str(file) for role, file in pair._asdict().items()}


def load(job: Job) -> Answer:
    """Load the target, and the draft model or lookup that the job's only k needs."""
    import numpy as np
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

    (k,) = job["k"]
    options = {"n_ctx": CONTEXT, "verbose": False}
    if "threads" in job:
        options |= {"n_threads": job["threads"], "n_threads_batch": job["threads"]}
    passes: list[int] = []  # one entry per target pass

    class Draft(LlamaDraftModel):  # type: ignore[misc]  # the package may not be installed
        def __call__(self, input_ids: Any, /, **_: Any) -> Any:
            passes.append(1)
            if lookup is not None:
                return lookup(input_ids)
            tokens = draft.generate(input_ids.tolist(), temp=0.0)
            return np.array([next(tokens) for _ in range(k)], dtype=np.intc)

    draft: Any = Llama(job["draft"], **options) if k != 0 and isinstance(k, int) else None
    lookup = LlamaPromptLookupDecoding(num_pred_tokens=int(k.split()[1])) if isinstance(k, str) else None
    if k != 0:
        options["logits_all"] = True  # without it the package overruns its logits at 512 tokens
    target = Llama(job["target"], draft_model=None if k == 0 else Draft(), **options)

    def answer(ids: list[int], tokens: int, k: int | str) -> tuple[Arrivals, float | None]:
        for model in (target, draft):
            if model is not None:
                model.reset()
                model._ctx.kv_cache_clear()
        passes.clear()
        started, arrivals = time.perf_counter(), list[tuple[float, int]]()
        if draft is not None:
            next(draft.generate(ids, temp=0.0))  # otherwise the draft would read the prompt after the first token
        passes_before = 0
        for _, _ in zip(target.generate(ids, temp=0.0, reset=False), range(tokens), strict=False):
            now = time.perf_counter() - started
            if arrivals and len(passes) == passes_before and k != 0:
                arrivals[-1] = (arrivals[-1][0], arrivals[-1][1] + 1)  # from the same pass
            else:
                arrivals.append((now, 1))
            passes_before = len(passes)
        return arrivals, None

    return answer
