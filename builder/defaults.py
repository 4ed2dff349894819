"""What is chosen if the user does not: the backend, the cache's capacity, and the batch."""

from __future__ import annotations

import importlib.util
import math
import platform
from typing import NamedTuple

import numpy as np

from outrider.bundle.manifest import READS_FEATURES, Manifest, Model
from outrider.engines.contract import Stage, cache_tensors, recent_rows
from outrider.engines.device import Cpu
from outrider.engines.precisions import DTYPES, PRECISIONS
from outrider.engines.session import SNAPSHOTS

K = [1, 2, 4, 8]
LARGE = 10**9  # parameters from which OpenVINO gives whole answers sooner, with AVX-512: docs/cpu.md
X86 = ("x86_64", "AMD64")
MOST_CAPACITY, LEAST_CAPACITY = 4096, 1024
MOST_BATCH = 4
CACHES, FREE = 1 / 8, 1 / 2  # of the device's memory, and of what the weights leave of the free memory, at most


class BackendChoice(NamedTuple):
    """A backend, and why it is chosen."""

    backend: str
    reason: str


def backends(manifest: Manifest) -> list[BackendChoice]:
    """Return the installed CPU backends for the models of an export, the preferred one first.

    OpenVINO comes first for targets of at least `LARGE` parameters on x86-64 with AVX-512, unless it refuses the models. The
    other one is there in case the first refuses something that this rule does not know.
    """
    target, billions = manifest.models["target"], manifest.models["target"].parameters / 1e9
    if importlib.util.find_spec("openvino") is None:
        return [BackendChoice("onnxruntime", "the only CPU backend that is installed")]
    if target.recurrent or "block-head" in manifest.models:
        what = "recurrent layers" if target.recurrent else "block heads"
        return [BackendChoice("onnxruntime", f"OpenVINO does not run {what}")]
    if platform.machine() not in X86:
        first, second, why = "onnxruntime", "openvino", f"OpenVINO was not measured on {platform.machine()}"
    elif target.parameters >= LARGE:
        first, second, why = "openvino", "onnxruntime", f"faster with {billions:.1f} billion parameters and AVX-512"
    else:
        first, second, why = "onnxruntime", "openvino", "faster with less than a billion parameters"
    if first == "openvino" and not _has_avx512():
        first, second, why = second, first, "faster without AVX-512"
    return [BackendChoice(first, why), BackendChoice(second, f"{first} refuses the models")]


def _has_avx512() -> bool:
    """Return whether the processor has AVX-512. NumPy's name for it depends on the release."""
    found: list[str] = np.show_config(mode="dicts").get("SIMD Extensions", {}).get("found", [])  # it drops empty lists
    return any(name == "X86_V4" or name.startswith("AVX512") for name in found)


def cache_bytes(
    model: Model, capacity: int, k: list[int], *, reads_features: bool, stage: Stage | None = None
) -> tuple[int, int]:
    """Return the bytes of one sequence's cache, or of a stage's part of it: those that grow with the capacity, and those of
    recurrent states and their snapshots. The target's features count as part of its cache."""
    sizes = {True: 0, False: 0}
    features = None if reads_features else model.features
    for tensor in cache_tensors(model.layers, features, model.recurrent):
        if stage is not None and tensor.past not in stage.inputs:
            continue
        dtype = DTYPES[tensor.dtype or PRECISIONS[model.precision].dtype]
        shape = tensor.sizes(capacity, recent_rows(model.recurrent, k[-1]))
        copies = 1 if tensor.positional else 1 + SNAPSHOTS
        sizes[tensor.positional] += copies * math.prod(shape) * dtype.numpy.itemsize
    return sizes[True], sizes[False]


def sequence_bytes(manifest: Manifest, capacity: int) -> int:
    """Return the bytes of one sequence's caches in all models."""
    return sum(
        sum(cache_bytes(model, capacity, K, reads_features=role in READS_FEATURES)) for role, model in manifest.models.items()
    )


def longest(manifest: Manifest, most: int) -> int:
    """Return `most` positions, or what the models allow if that is less."""
    return min([most, *(model.max_positions for model in manifest.models.values() if model.max_positions)])


def capacity_and_batch(
    manifest: Manifest, memory: tuple[int, int] | None = None, capacity: int | None = None
) -> tuple[int, int]:
    """Return the capacity and the batch whose caches take at most `CACHES` of the memory, and `FREE` of what the weights leave.

    A long text for one sequence comes before a second sequence. The capacity is at most `MOST_CAPACITY`, or what the models
    allow, unless it is given.

    Args:
        manifest: an export's.
        memory: the free and the total bytes; the machine's by default.
        capacity: None to choose it.
    """
    free, total = Cpu().memory() if memory is None else memory
    room = min(total * CACHES, (free - sum(file.size for file in manifest.files.values())) * FREE)
    if capacity is None:
        capacity = longest(manifest, MOST_CAPACITY)
        while capacity > LEAST_CAPACITY and sequence_bytes(manifest, capacity) > room:
            capacity = max(capacity // 2, LEAST_CAPACITY)
    batch = MOST_BATCH
    while batch > 1 and batch * sequence_bytes(manifest, capacity) > room:
        batch //= 2
    return capacity, batch
