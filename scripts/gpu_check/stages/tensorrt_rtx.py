"""TensorRT-RTX, where the GPU is one of its."""

from __future__ import annotations

from outrider.backends.tensorrt.package import RTX
from outrider.scripts.gpu_check.report import Report
from outrider.scripts.gpu_check.stages.base import Folders
from outrider.scripts.gpu_check.stages.tensorrt_full import check_package


def check(report: Report, folders: Folders) -> None:
    """Check the package."""
    check_package(RTX, report, folders)
