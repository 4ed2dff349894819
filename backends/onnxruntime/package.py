"""The package `onnxruntime`, and what its backend's parts agree on."""

from __future__ import annotations

from outrider.errors import EngineError

EXTRA = "cpu"
MASK_FREE = "attention without a mask"  # the name of a rewrite for CUDA, which runs on the CPU, too


def package_version() -> str:
    """Return the release of ONNX Runtime that is installed.

    Raises:
        EngineError: none is.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise EngineError(f"onnxruntime cannot be imported: {error}", f"pip install 'outrider[{EXTRA}]'") from error
    version: str = onnxruntime.__version__
    return version
