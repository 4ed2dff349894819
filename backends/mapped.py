"""Weights that an engine has mapped into this process. Pages that it no longer reads need not stay in memory.

Releasing them loses nothing: a page that is read after all comes from the file again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path

from outrider.bundle.manifest import WEIGHTS

MAPPING = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+ +(.*)\n", re.MULTILINE)
WRITTEN = re.compile(rb"^(?:Anonymous|Swap): +[1-9]", re.MULTILINE)  # pages that the file does not have

Span = tuple[int, int]  # begin and end address


def mapped(path: Path) -> set[Span]:
    """Return the parts of the weights of the graph at `path` that are mapped to be read only."""
    return {span for span, rights, _ in _mappings(path, "maps") if b"w" not in rights}


def unwritten(path: Path) -> set[Span]:
    """Return the mapped parts of the weights of the graph at `path` to which nobody has written, although it may be allowed.

    The kernel looks at all memory of the process for this, which takes some 20 ms for a gigabyte.
    """
    return {span for span, _, details in _mappings(path, "smaps") if not WRITTEN.search(details)}


def give_back(spans: set[Span]) -> None:
    """Release the pages of mappings, which must still exist."""
    for first, last in spans:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


def _mappings(path: Path, table: str) -> Iterator[tuple[Span, bytes, bytes]]:
    """Yield the mappings of a graph's weights from one of the kernel's tables: addresses, rights, and what else it says."""
    try:
        _, *parts = MAPPING.split(Path("/proc/self", table).read_bytes())
    except OSError:  # not Linux, or it may not be read
        return
    file = os.fsencode(path.with_name(path.name + WEIGHTS).resolve())
    for first, last, rights, name, details in zip(*(parts[at::5] for at in range(5)), strict=True):
        if name == file:
            yield (int(first, 16), int(last, 16)), rights, details
