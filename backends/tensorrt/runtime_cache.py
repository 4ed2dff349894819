"""The kernels that TensorRT-RTX compiles for the shapes it meets on a GPU, kept beside the bundle for the next process.

They are not in the bundle, which is sealed, and the same for every GPU. TensorRT-RTX itself refuses kernels of another GPU,
driver or release.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from outrider.bundle.manifest import Manifest


class RuntimeCache:
    """The kernels of one engine's contexts."""

    def __init__(self, cache: Any, file: Path):
        """Fill `cache`, an `IRuntimeCache`, from `file` if that has kernels for this machine."""
        self.cache = cache
        self._file = file
        with suppress(OSError):  # there is none yet, or it may not be read
            cache.deserialize(file.read_bytes())

    def save(self) -> None:
        """Write the kernels, if there is a place for them: a bundle may be on a file system that is read-only."""
        partial = self._file.with_name(f"{self._file.name}.{os.getpid()}.partial")
        with suppress(OSError):
            self._file.parent.mkdir(exist_ok=True)
            partial.write_bytes(self.cache.serialize())
            partial.replace(self._file)


def cache_file(bundle: Path, manifest: Manifest, plan: str) -> Path:
    """Return where the kernels of a plan are kept: a rebuilt plan has another file."""
    return bundle.with_name(f".{bundle.name}.kernels") / f"{manifest.files[plan].sha256[:32]}.bin"
