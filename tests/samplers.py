"""What the tests of the sampler graphs share: sessions of them, and one call that runs one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from outrider.engines.contract import EDITS, SETTINGS, sampler_tensors
from outrider.engines.onnxruntime import OnnxRuntimeSampler
from outrider.export.sampler import sampler

Array = npt.NDArray[Any]
Graphs = Callable[[str, int, int], OnnxRuntimeSampler]
NEUTRAL = {name: 1.0 if name in ("temperature", "top_p", "repetition_penalty") else 0.0 for name in SETTINGS}
UNEDITED = (np.zeros((1, 1), dtype=np.int64), np.zeros((1, 1, len(EDITS)), dtype=np.float32))


def sampler_graphs(folder: Path) -> Graphs:
    """Each sampler by its name and widths, made once."""

    @functools.cache
    def made(name: str, vocab_rows: int, draft_rows: int) -> OnnxRuntimeSampler:
        path: Path = folder / f"{name}-{vocab_rows}-{draft_rows}.onnx"
        ir.save(sampler(name, vocab_rows, draft_rows), path)
        return OnnxRuntimeSampler(path, name, vocab_rows, draft_rows)

    return made


def row(**values: float) -> Array:
    """One sequence's settings, float32 [8]."""
    return np.array(list((NEUTRAL | values).values()), dtype=np.float32)


def run(graphs: Graphs, name: str, vocab_rows: int, draft_rows: int, **inputs: Array) -> tuple[Array, ...]:
    """The outputs of a sampler, in order."""
    sizes = {"batch": inputs["logits"].shape[0], "rows": inputs["logits"].shape[1], "top": int(inputs["candidates"][0])}
    wanted, given = sampler_tensors(name, vocab_rows, draft_rows)
    outputs = {
        each.name: np.zeros([size if isinstance(size, int) else sizes[size] for size in each.shape], np.dtype(each.dtype))
        for each in given
    }
    ready = {each.name: np.ascontiguousarray(inputs[each.name], dtype=each.dtype) for each in wanted}
    graphs(name, vocab_rows, draft_rows).run(ready, outputs)
    return tuple(outputs.values())
