"""Python's search for cyclic garbage, in commands that end soon."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Do not search for garbage, and never search what exists afterwards.

    Importing torch and tracing a model make a million objects that stay. Searching them takes a quarter of the time of a small
    export, and three more seconds when the process exits.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()
