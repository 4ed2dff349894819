"""The report, the time limit and the fixtures of the tests that need a GPU."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from outrider.tests.gpu.report import Report

if TYPE_CHECKING:
    from outrider.tests.fixtures import Once  # which imports torch

LIMIT = 1200  # seconds of a test with its fixtures; gpu(..., limit=SECONDS) sets another
BACKENDS = {"tensorrt-rtx": "tensorrt_rtx", "tensorrt": "tensorrt", "onnxruntime": "onnxruntime"}  # and their modules


def _folder(config: pytest.Config) -> Path | None:
    """Return the folder of the report, which only `-m gpu` writes."""
    return config.rootpath / "build" / "gpu" if config.option.markexpr.startswith("gpu") else None


def pytest_configure(config: pytest.Config) -> None:
    """Write a report, from the process that hears of every test."""
    if (folder := _folder(config)) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Report(folder))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End the process if a test takes too long: nothing less ends a call that hangs in CUDA."""
    marker, folder = item.get_closest_marker("gpu"), _folder(item.config)
    if marker is None or folder is None:
        return (yield)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "hung.txt", "w") as traceback:
        faulthandler.dump_traceback_later(marker.kwargs.get("limit", LIMIT), exit=True, file=traceback)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def machine() -> dict[str, str]:
    from outrider.tests.gpu import hardware  # which needs a package that other machines lack

    return hardware.machine()


@pytest.fixture(autouse=True)
def _machine(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    if request.node.get_closest_marker("gpu"):
        record_property("machine", request.getfixturevalue("machine"))


@pytest.fixture(scope="session")
def exports(request: pytest.FixtureRequest, once: Once) -> Callable[[str], Path]:
    """Return a function from the name of an export to its folder, in `--exports` if it is there."""
    from outrider.tests.gpu.exports import EXPORTS

    ready: Path | None = request.config.getoption("--exports")

    def export(name: str) -> Path:
        folder = f"onnx-{name}"
        return ready / folder if ready and (ready / folder).exists() else once(folder, EXPORTS[name])

    return export


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the arguments of `build_engine` for each backend that runs on this GPU."""
    package = pytest.importorskip(BACKENDS[request.param], reason=f"{request.param} is not installed")
    if request.param == "onnxruntime":
        if "CUDAExecutionProvider" not in package.get_available_providers():
            pytest.skip("the installed onnxruntime is the package without CUDA")
        return {"backend": "onnxruntime", "device": "cuda"}
    from outrider.backends.tensorrt.package import RTX
    from outrider.engines.cuda import Cuda

    if request.param == RTX.backend and (reason := RTX.unsupported(Cuda().compute_capability)) is not None:
        pytest.skip(reason)
    return {"backend": request.param}


@pytest.fixture(scope="session")
def bundles(exports: Callable[[str], Path], backend: dict[str, Any], once: Once) -> Callable[..., Path]:
    """Return a function from a precision, and options of `outrider build-engine`, to a bundle of the shipped pair."""
    from outrider.tests.gpu.exports import build

    def bundle(precision: str, *options: str) -> Path:
        name = "-".join((backend["backend"], precision, *options))
        sizes = "--capacity", "512", "--max-prompt-chunk", "64"
        return once(name, lambda folder: build(exports(precision), folder, backend, *sizes, *options))

    return bundle
