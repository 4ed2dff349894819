"""TensorRT."""

from __future__ import annotations

from outrider.backends.tensorrt.package import TENSORRT, Package
from outrider.engines.cuda import Cuda
from outrider.errors import EngineError
from outrider.scripts.gpu_check.report import Report
from outrider.scripts.gpu_check.stages.base import PRECISION, Folders, check_audit, check_engines, check_speed, check_tests


def check(report: Report, folders: Folders) -> None:
    """Check the package."""
    check_package(TENSORRT, report, folders)


def check_package(package: Package, report: Report, folders: Folders) -> None:
    """Check one of the two packages."""
    try:
        package.load()
    except EngineError as error:
        report.skip(package.title, str(error))
        return
    if (reason := package.unsupported(Cuda().compute_capability)) is not None:
        report.skip(package.title, reason)
        return
    if PRECISION not in check_engines(report, package.backend, folders):
        return
    check_tests(report, package.backend, folders)
    check_audit(report, package.backend, folders)
    check_speed(report, package.backend, folders)
