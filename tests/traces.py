"""Shares traces of equal modules between the tests of a run."""

from __future__ import annotations

import hashlib
import pickle
import shutil
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from filelock import FileLock
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.export.graph import step_model, tracing
from outrider.export.graph.untouched import UNTOUCHED
from outrider.export.heads import markov

_trace = tracing.to_onnx


class _Content(pickle.Pickler):
    """Pickles tensors as what they hold, wherever that is, and models without the folders that they were read from."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, PreTrainedModel | PreTrainedConfig):
            return tuple, ((type(value).__qualname__, vars(value) | {"name_or_path": "", "_name_or_path": ""}),)
        if isinstance(value, torch.Tensor):
            if hasattr(value, UNTOUCHED):  # a streamed weight, which gets its values after the trace
                return repr, ((value.dtype, value.shape),)
            raw = value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            return bytes, (repr((value.dtype, value.shape)).encode() + hashlib.sha256(raw).digest(),)
        return NotImplemented


class _Digest:
    """A file that keeps the digest of what is written to it."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.hexdigest = self._hash.hexdigest

    def write(self, data: bytes) -> None:
        self._hash.update(data)


def share_traces(folder: Path) -> None:
    """Trace each module once for all processes that share through `folder`.

    Modules are equal if all that they hold is: weights, settings, classes. So a checkpoint never gets the graph of another one.
    What `trace` adds to a graph, and everything after it, is done each time.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def traced(module: nn.Module, *arguments: Any) -> torch.onnx.ONNXProgram:
        digest = _Digest()
        _Content(digest).dump((module, arguments))
        path = folder / digest.hexdigest() / "model.onnx"
        with FileLock(f"{path.parent}.lock"):
            if path.exists():
                return torch.onnx.ONNXProgram(ir.load(path), None)
            program = _trace(module, *arguments)
            partial = folder / f"{digest.hexdigest()}.making"  # a test of a full disk leaves nothing that looks whole
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            program.save(partial / path.name, external_data=True)
            partial.rename(path.parent)
        return program

    for user in (step_model, markov):
        setattr(user, "to_onnx", traced)  # noqa: B010  # as a name that mypy does not follow
