"""transformers, plain and assisted, with the same checkpoints."""

from __future__ import annotations

from outrider.scripts.gpu_check.report import Report
from outrider.scripts.gpu_check.stages.base import PAIR, PROMPT, Folders
from outrider.scripts.gpu_check.timing import time_transformers


def check(report: Report, folders: Folders) -> None:
    """Time both."""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        report.skip("transformers", str(error))
        return
    report.run("timing", lambda: time_transformers(report, PAIR, PROMPT))
