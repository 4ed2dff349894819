"""Python's search for cyclic garbage, in commands that end soon."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outrider.bundle.manifest import Manifest
from outrider.export.arguments import ExportArguments
from outrider.export.interrupts import kept_interrupts
from outrider.progress import Progress


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


def exporter(progress: Progress) -> Callable[[ExportArguments, Progress], Manifest]:
    """Import `export`, which takes seconds. What is imported is not searched when an export frees a model."""
    progress.stage("importing torch and transformers")
    with kept_interrupts():
        from outrider.export.pair import export

    gc.freeze()
    return export
