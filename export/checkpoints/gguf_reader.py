"""Read the metadata of a GGUF file once, with the package `gguf`, for us and for transformers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import gguf
import numpy as np
import numpy.typing as npt
from transformers import modeling_gguf_pytorch_utils

from outrider.export.checkpoints.swapped import swapped

R = TypeVar("R")
_theirs = modeling_gguf_pytorch_utils.load_gguf_checkpoint


class _Reader(gguf.GGUFReader):
    """gguf's reader, in a seventh of the time: a vocabulary has half a million small arrays, and memmap is slow to slice."""

    def _get(
        self, offset: int, dtype: npt.DTypeLike, count: int = 1, override_order: Literal["I", "S", "<"] | None = None
    ) -> npt.NDArray[Any]:
        found = np.frombuffer(self.data, dtype, int(count), int(offset))
        order = override_order or self.byte_order
        return found if order == "I" else found.view(found.dtype.newbyteorder(order))


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
            return _theirs(path, return_tensors=True, **options) if return_tensors else copy.deepcopy(_parsed(Path(path)))

    with swapped(modeling_gguf_pytorch_utils, "load_gguf_checkpoint", load):
        yield


@once_per_file
def _parsed(path: Path) -> Any:
    """Return what transformers makes of a file's metadata."""
    return _theirs(str(path))
