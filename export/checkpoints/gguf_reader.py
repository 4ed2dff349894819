"""Read the metadata of a GGUF file once, with the package `gguf`, for us and for transformers."""

from __future__ import annotations

import copy
import functools
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import gguf
import numpy as np
import numpy.typing as npt
from transformers import modeling_gguf_pytorch_utils
from transformers.integrations.gguf import reader

from outrider.export.checkpoints.swapped import swapped

R = TypeVar("R")
_theirs, _mapped = modeling_gguf_pytorch_utils.load_gguf_checkpoint, reader._mapped


class _Reader(gguf.GGUFReader):
    """gguf's reader, in a fraction of the time: a vocabulary has half a million small parts, and memmap is slow to slice."""

    def _get(
        self, offset: int, dtype: npt.DTypeLike, count: int = 1, override_order: Literal["I", "S", "<"] | None = None
    ) -> npt.NDArray[Any]:
        found = np.frombuffer(self.data, dtype, int(count), int(offset))
        order = override_order or self.byte_order
        return found if order == "I" else found.view(found.dtype.newbyteorder(order))

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[gguf.GGUFValueType]]:
        """Read an array's values together. Strings are memory views, which transformers turns into text faster than arrays."""
        kind = gguf.GGUFValueType(raw_type)
        if kind != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        of_values, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        values, number = gguf.GGUFValueType(of_values[0]), int(count[0])
        parts: list[Any] = [of_values, count]
        kinds: list[gguf.GGUFValueType] = [kind, values] if number else [kind]
        at = orig_offs + 12
        if values in self.gguf_scalar_to_np:
            found = self._get(at, self.gguf_scalar_to_np[values], number)
            return 12 + found.nbytes, [*parts, *found[:, None]], [*range(2, 2 + number)], kinds
        if values != gguf.GGUFValueType.STRING:
            return super()._get_field_parts(orig_offs, raw_type)
        is_little = (sys.byteorder == "little") == (self.byte_order == "I")
        data, length = self.data.data, struct.Struct("<Q" if is_little else ">Q")
        for _ in range(number):
            (size,) = length.unpack_from(data, at)
            parts += (data[at : at + 8], data[at + 8 : at + 8 + size])
            at += 8 + size
        return at - orig_offs, parts, [*range(3, 3 + 2 * number, 2)], kinds


def once_per_file(read: Callable[[Path], R]) -> Callable[[Path], R]:
    """Make a function of a file read it once, unless the file changes; the last two files are remembered."""

    @functools.lru_cache(maxsize=2)  # for a target and its draft
    def remembered(path: Path, *_: int) -> R:
        return read(path)

    @functools.wraps(read)
    def reading(path: Path) -> R:
        status = path.stat()
        return remembered(path, status.st_mtime_ns, status.st_size)

    return reading


@once_per_file
def open_gguf(path: Path) -> gguf.GGUFReader:
    """Open a file.

    Raises:
        Exception: the file is damaged; of any type.
    """
    return _Reader(path)


@contextmanager
def metadata_read_once() -> Iterator[None]:
    """Make transformers read the metadata of each file once, and not for the configuration and each part of a tokenizer."""

    def load(path: str, return_tensors: bool = False, **options: Any) -> Any:
        with swapped(gguf, "GGUFReader", lambda path: open_gguf(Path(path))):
            if return_tensors:
                return _theirs(path, return_tensors=True, **options)
            return {part: {key: copy.copy(value) for key, value in each.items()} for part, each in _parsed(Path(path)).items()}

    def mapped(path: str) -> Any:
        return _mapped(path).view(np.ndarray)  # memmap is slow to slice

    with swapped(modeling_gguf_pytorch_utils, "load_gguf_checkpoint", load), swapped(reader, "_mapped", mapped):
        yield


@once_per_file
def _parsed(path: Path) -> Any:
    """Return what transformers makes of a file's metadata."""
    return _theirs(str(path))
