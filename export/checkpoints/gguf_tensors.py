"""Read the tensors of a GGUF file one by one, for architectures whose files transformers would read as a whole."""

from __future__ import annotations

import functools
import math
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from transformers import PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from outrider.engines.arrays import Floats
from outrider.errors import SourceError
from outrider.export.checkpoints.gguf_blocks import BLOCKS
from outrider.export.checkpoints.gguf_reader import open_gguf
from outrider.export.checkpoints.source import AGAIN
from outrider.export.checkpoints.swapped import swapped

NUMBERS_AT_ONCE = 2**20  # dequantization makes several arrays of this size, which should stay in the caches
TOGETHER = re.compile(r"(blk\.\d+\.ffn_)(gate|up)(_exps.*)")  # two tensors for one of the model


class GgufTensor:
    """A tensor of the model, float32."""

    def __init__(self, file: GgufTensors, group: str, name: str, empty: torch.Tensor, contents: frozenset[str]):
        self.empty, self.contents = empty, contents
        self._file, self._group, self._name = file, group, name

    def __getitem__(self, _: Any) -> torch.Tensor:
        return self._file.take(self._group, self._name)

    def content(self, name: str) -> torch.Tensor:
        """Return one of `integers.CONTENTS`, in the tensor's shape. There must be contents."""
        return self._file.take(self._group, self._name, name)


class GgufTensors:
    """The tensors of a file, in groups that are converted together."""

    def __init__(self, path: Path, architecture: str, model: PreTrainedModel):
        """Open a file.

        Args:
            path: the path of the file.
            architecture: its `general.architecture`.
            model: the model to load, perhaps without weights.
        """
        self._path = path
        self._groups: dict[str, list[Any]] = {}
        for tensor in open_gguf(path).tensors:
            self._groups.setdefault(TOGETHER.sub(r"\1gate_up\3", tensor.name), []).append(tensor)
        self._processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
        with swapped(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)):  # the same for each module
            self._names = get_gguf_hf_weights_map(model, self._processor)
        self._lock = threading.Lock()  # transformers loads with several threads
        self._last, self._read = ("", ""), dict[str, torch.Tensor]()

    def outlines(self) -> dict[str, GgufTensor]:
        """Return the tensors of the model, by their names in the model."""
        found: dict[str, GgufTensor] = {}
        for group in self._groups:
            made = self._convert(group, _of_one_number)
            every = [_contents(tensor.tensor_type) for tensor in self._groups[group]]
            contents = frozenset[str]().union(*every) if all(every) else frozenset[str]()
            found |= {name: GgufTensor(self, group, name, each.to("meta"), contents) for name, each in made.items()}
        return found

    def take(self, group: str, name: str, content: str = "") -> torch.Tensor:
        """Return a tensor, or one of `integers.CONTENTS` of it.

        The others of its group are kept until they are taken, or one of another group is.
        """
        with self._lock:
            if (group, content) != self._last or name not in self._read:
                self._last, self._read = (group, content), self._convert(group, functools.partial(self._numbers, content))
            return self._read.pop(name).contiguous()

    def _convert(self, group: str, values: Callable[[Any], Floats]) -> dict[str, torch.Tensor]:
        """Return the tensors that transformers makes of a group, by their names in the model."""
        made: dict[str, torch.Tensor] = {}
        for tensor in self._groups[group]:
            result = self._processor.process(
                weights=values(tensor),
                name=tensor.name,
                tensor_key_mapping=self._names,
                parsed_parameters={"tensors": made},
            )
            if result.name in self._names:
                made[self._names[result.name]] = torch.from_numpy(result.weights)
        return made

    def _numbers(self, content: str, tensor: Any) -> Floats:
        """Return the numbers of a tensor, or one of `integers.CONTENTS` of each.

        The file is read, and not mapped, so that its pages do not stay in memory.

        Raises:
            SourceError: the file is shorter than it was.
        """
        kind, shape = tensor.tensor_type, _shape(tensor)
        of_block, bytes_ = gguf.GGML_QUANT_SIZES[kind]
        numbers = np.empty(math.prod(shape), dtype=np.float32)
        with self._path.open("rb") as file:
            file.seek(int(tensor.data_offset))
            for first in range(0, len(numbers), NUMBERS_AT_ONCE):
                some = numbers[first : first + NUMBERS_AT_ONCE]
                size = len(some) // of_block * bytes_
                if len(blocks := np.fromfile(file, np.uint8, size)) < size:
                    raise SourceError(f"{self._path} was truncated while it was being read", AGAIN)
                if kind in BLOCKS:
                    groups = BLOCKS[kind](torch.from_numpy(blocks).view(-1, bytes_))
                    groups.write(content, torch.from_numpy(some)) if content else groups.dequantize(torch.from_numpy(some))
                else:
                    some[:] = gguf.dequantize(blocks, kind)
        return numbers.reshape(shape)


@functools.cache
def _contents(kind: gguf.GGMLQuantizationType) -> frozenset[str]:
    """Return which of `integers.CONTENTS` the tensors of a type have."""
    if kind not in BLOCKS:
        return frozenset()
    groups = BLOCKS[kind](torch.zeros(1, gguf.GGML_QUANT_SIZES[kind][1], dtype=torch.uint8))
    return frozenset({"integers", "scales"} if groups.offsets is None else {"integers", "scales", "offsets"})


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(map(int, tensor.shape[::-1]))


def _of_one_number(tensor: Any) -> Floats:
    """Return an array in the shape of a tensor that takes no memory. Converters also take the logarithm of minus a tensor."""
    return as_strided(np.full(1, -1, np.float32), _shape(tensor), strides=(0,) * len(tensor.shape))
