"""Exports that the other stages build from. They are portable: they can be made on another machine, and carried."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from outrider.scripts.gpu_check.report import Report
from outrider.scripts.gpu_check.stages.base import PAIR, PRECISION, PRECISIONS, Folders, outrider


def _export(folder: Path, precision: str, draft: bool = True) -> None:
    drafts = ("--draft", PAIR / "draft") if draft else ()
    outrider("export", "--target", PAIR / "target", *drafts, "--precision", precision, "-o", folder)


def _export_broken(folder: Path) -> None:
    from outrider.tests.support import broken_export

    broken_export(folder)


EXPORTS: dict[str, Callable[[Path], None]] = {
    **{f"onnx-{precision}": partial(_export, precision=precision) for precision in PRECISIONS},
    "onnx-alone": partial(_export, precision=PRECISION, draft=False),
    "onnx-broken": _export_broken,
}
"""What writes each export: the shipped pair in each precision, its target alone, and a pair whose logits may contain NaN."""


def check(report: Report, folders: Folders) -> None:
    """Make the exports that are not there."""
    folders.exports.mkdir(parents=True, exist_ok=True)
    for name, export in EXPORTS.items():
        if (folders.exports / name).exists():
            report.skip(name, "it is there already")
        else:
            report.run(name, partial(export, folders.exports / name))
