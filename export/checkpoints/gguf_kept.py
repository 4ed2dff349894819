"""What `--precision as-is` takes of a GGUF file, by the types of its tensors."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import gguf
import torch

from outrider.engines.precisions import BATCH_INVARIANT_BLOCK
from outrider.export.checkpoints.gguf_blocks import BLOCKS, Groups
from outrider.export.checkpoints.gguf_reader import open_gguf

SCALE_BITS = 32  # of a scale or an offset in a kernel's layout
EMBEDDING, HEAD = "token_embd.weight", "output.weight"


class Kept(NamedTuple):
    """The weights of a file's matrices that as-is keeps."""

    kind: str  # the type of most of them, such as Q4_K
    bits: float  # of a weight on average, with scales and offsets
    ratio: float  # bytes of all matrices, over what they take in int4 with a head in int8
    offsets: bool  # whether that type has offsets, for which kernels compute a second product
    parameters: int  # of all matrices


def kept(path: Path) -> Kept | None:
    """Return what as-is keeps of a file; None if most of its weights are not integers that are read.

    Raises:
        Exception: the file is damaged; of any type.
    """
    sizes = {each.name: (each.tensor_type, int(each.n_elements)) for each in open_gguf(path).tensors if len(each.shape) > 1}
    parameters = sum(count for _, count in sizes.values())
    head = HEAD if HEAD in sizes else EMBEDDING
    if head != EMBEDDING:
        sizes.pop(EMBEDDING, None)  # in fp32 either way
    weights = Counter[gguf.GGMLQuantizationType]()
    for kind, count in sizes.values():
        weights[kind] += count
    (kind, _), *_ = weights.most_common(1)
    if kind not in BLOCKS:
        return None
    as_is = sum(count * _bits(kind) for kind, count in weights.items())
    rounded = sum(count * _rounded(8 if name == head else 4) for name, (_, count) in sizes.items())
    return Kept(kind.name, as_is / weights.total(), as_is / rounded, _groups(kind).offsets is not None, parameters)


def _bits(kind: gguf.GGMLQuantizationType) -> float:
    """Return how many bits a weight of a type takes in a kernel's layout, scales and offsets included."""
    if kind not in BLOCKS:
        return _rounded(8)
    groups = _groups(kind)
    bits = 4 if int(groups.integers.max()) - int(groups.integers.min()) < 2**4 else 8
    return bits + SCALE_BITS * (1 if groups.offsets is None else 2) / groups.integers.shape[-1]


def _groups(kind: gguf.GGMLQuantizationType) -> Groups:
    """Return the groups of blocks of a type that have its least and its greatest integer."""
    extremes = torch.tensor([0x00, 0x7F, 0x80, 0xFF], dtype=torch.uint8)
    return BLOCKS[kind](extremes[:, None].repeat(1, gguf.GGML_QUANT_SIZES[kind][1]))


def _rounded(bits: int) -> float:
    return bits + SCALE_BITS / BATCH_INVARIANT_BLOCK[bits]
