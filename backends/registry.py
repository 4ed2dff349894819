"""The registry of backends. To add one, subclass `Backend` and call `register`."""

from __future__ import annotations

from outrider.backends.base import Backend
from outrider.backends.onnxruntime.backend import OnnxRuntimeBackend
from outrider.backends.openvino.backend import OpenVinoBackend
from outrider.backends.tensorrt.backend import RTX_BACKEND, TENSORRT_BACKEND
from outrider.errors import EngineError

_BACKENDS: dict[str, Backend] = {}


def register(backend: Backend) -> None:
    """Add a backend to the registry, under its name.

    Raises:
        ValueError: the name is taken.
    """
    if backend.name in _BACKENDS:
        raise ValueError(f"there is already a backend called {backend.name!r}")
    _BACKENDS[backend.name] = backend


def unregister(name: str) -> None:
    """Remove a backend from the registry."""
    del _BACKENDS[name]


def get(name: str) -> Backend:
    """Return the backend of that name.

    Raises:
        EngineError: no backend has this name.
    """
    if name not in _BACKENDS:
        raise EngineError(f"this outrider has no backend {name!r}", "upgrade outrider, or build the bundle again")
    return _BACKENDS[name]


def names() -> tuple[str, ...]:
    """Return the names of all backends, in the order of registration."""
    return tuple(_BACKENDS)


def devices() -> tuple[str, ...]:
    """Return the values of `--device`, over all backends."""
    return tuple(dict.fromkeys(device for backend in _BACKENDS.values() for device in backend.devices))


REFERENCE = OnnxRuntimeBackend()  # the default, and the reference for comparisons
for _backend in (REFERENCE, OpenVinoBackend(), RTX_BACKEND, TENSORRT_BACKEND):
    register(_backend)
