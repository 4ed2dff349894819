"""ONNX Runtime with CUDA: where its nodes run, whether its engines are right, and how fast they are."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from outrider.bundle.folder import read_manifest
from outrider.bundle.manifest import graph_files
from outrider.engines.cuda import Cuda
from outrider.engines.device import Device
from outrider.scripts.gpu_check.report import Report
from outrider.scripts.gpu_check.stages.base import PRECISION, Folders, check_audit, check_engines, check_speed, check_tests

BACKEND = "onnxruntime"


def check(report: Report, folders: Folders) -> None:
    """Check the engines of the shipped pair."""
    try:
        import onnxruntime
    except ImportError as error:
        report.skip(BACKEND, str(error))
        return
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        report.skip(BACKEND, "the installed onnxruntime is the package without CUDA")
        return
    if PRECISION not in check_engines(report, BACKEND, folders):
        return
    report.run("where the nodes run", lambda: placement(folders.work / f"{BACKEND}-{PRECISION}", Cuda()))
    check_tests(report, BACKEND, folders)
    check_audit(report, BACKEND, folders)
    check_speed(report, BACKEND, folders)


def placement(bundle: Path, device: Device) -> dict[str, str]:
    """Return, for each engine of a bundle, how many of its nodes ONNX Runtime runs where.

    A node on the CPU, or a copy between the two, makes the GPU wait for the host.
    """
    from outrider.backends.onnxruntime.engine import inference_session

    counts = {}
    for name in read_manifest(bundle).engines:
        session = inference_session(bundle / graph_files(name)[0], device, record_placement=True)
        nodes: Counter[str] = Counter()
        for part in session.get_provider_graph_assignment_info():
            nodes[part.ep_name.removesuffix("ExecutionProvider")] += len(part.get_nodes())
        counts[name] = ", ".join(f"{count} {where}" for where, count in nodes.most_common())
    return counts
