"""Weights that an engine has mapped into this process, whose pages need not stay in memory once it has copied them.

Releasing them loses nothing: a page that is read after all comes from the file again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.bundle.manifest import WEIGHTS

MAPPING = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+ +(.*)$", re.MULTILINE)
PAGE_OUT = 21  # MADV_PAGEOUT of Linux 5.4, which Python has no name for
PAUSE = 0.05  # seconds between two releases

Span = tuple[int, int]  # begin and end address


def mapped(path: Path) -> set[Span]:
    """Return the parts of the weights of the graph at `path` that are mapped to be read only."""
    return {span for span, rights in _mappings(path) if b"w" not in rights}


def give_back(spans: set[Span]) -> None:
    """Release the pages of mappings at once. They must still exist: other memory at these addresses would be lost."""
    _advise(spans, mmap.MADV_DONTNEED)


def page_out(path: Path) -> None:
    """Release the pages of all mappings of a graph's weights, in the system's cache as well if no other process uses them.

    No memory is lost even if another thread ends a mapping meanwhile, and an engine may have written to one.
    """
    _advise({span for span, _ in _mappings(path)}, PAGE_OUT)


@contextmanager
def repeatedly(release: Callable[[], None]) -> Iterator[None]:
    """Call a function that releases pages every `PAUSE` seconds in the block, from a thread, and once more after it."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(PAUSE):
            release()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        release()


def _advise(spans: set[Span], advice: int) -> None:
    for first, last in spans:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)


def _mappings(path: Path) -> Iterator[tuple[Span, bytes]]:
    """Yield the addresses and rights of the mappings of a graph's weights."""
    try:
        maps = Path("/proc/self/maps").read_bytes()
    except OSError:  # not Linux, or it may not be read
        return
    file = os.fsencode(path.with_name(path.name + WEIGHTS).resolve())
    for first, last, rights, name in MAPPING.findall(maps):
        if name == file:
            yield (int(first, 16), int(last, 16)), rights
