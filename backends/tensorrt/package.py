"""The two TensorRT packages, and how they differ."""

from __future__ import annotations

import importlib
from typing import Any

import msgspec

from outrider.errors import EngineError


class Package(msgspec.Struct, frozen=True):
    """A TensorRT package."""

    backend: str  # the name of its backend
    module: str
    title: str
    extra: str  # outrider's extra that installs it
    builds_anywhere: bool  # False if it builds only on the GPU that will run the engine

    def load(self) -> Any:
        """Return the package's module.

        Raises:
            EngineError: it is not installed.
        """
        try:
            return importlib.import_module(self.module)
        except (ImportError, OSError) as error:  # an OSError if one of the package's libraries is missing
            raise EngineError(f"{self.module} cannot be imported: {error}", f"pip install 'outrider[{self.extra}]'") from error


RTX = Package("tensorrt-rtx", "tensorrt_rtx", "TensorRT-RTX", "rtx", builds_anywhere=True)
TENSORRT = Package("tensorrt", "tensorrt", "TensorRT", "tensorrt", builds_anywhere=False)
