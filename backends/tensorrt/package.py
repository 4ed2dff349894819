"""The two TensorRT packages, and how they differ."""

from __future__ import annotations

from typing import Any

import msgspec

from outrider.backends.base import import_package
from outrider.bundle.manifest import ROLES


class Package(msgspec.Struct, frozen=True):
    """A TensorRT package."""

    backend: str  # the name of its backend
    module: str
    title: str
    extra: str  # outrider's extra that installs it
    builds_anywhere: bool  # False if it builds only on the GPU that will run the engine
    capabilities: tuple[str, ...] = ()  # compute capabilities that it supports, whole or major; empty is all
    gpus: str = ""  # the same in words

    def unsupported(self, compute_capability: str) -> str | None:
        """Return why the package does not support a compute capability; None if it does."""
        if not self.capabilities or {compute_capability, compute_capability.split(".")[0]} & set(self.capabilities):
            return None
        return f"{self.title} does not run on compute capability {compute_capability}: it runs on {self.gpus}"

    def load(self) -> Any:
        """Return the package's module.

        Raises:
            EngineError: it is not installed.
        """
        return import_package(self.module, self.extra)


# From TensorRT-RTX 1.7.1, which calls every plan invalid on other GPUs, even if it was built for them.
RTX_CAPABILITIES = "7.5", "8.0", "8.6", "8.9", "12"
RTX_GPUS = "7.5, 8.0, 8.6, 8.9, 12.0, 12.1 and later 12.x; not 9.0 or 10.x"
OTHER_BACKENDS = "on this GPU, use a bundle built with --backend onnxruntime --device cuda, or with --backend tensorrt"

RTX = Package("tensorrt-rtx", "tensorrt_rtx", "TensorRT-RTX", "rtx", True, RTX_CAPABILITIES, RTX_GPUS)
TENSORRT = Package("tensorrt", "tensorrt", "TensorRT", "tensorrt", builds_anywhere=False)


def plan_file(name: str) -> str:
    """Return the path inside a bundle of the plan of one of `ENGINES`."""
    return f"{name}/model.plan" if name in ROLES else f"sampler/{name}.plan"
