"""The command line of `scripts/gpu-check`."""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.scripts.gpu_check import checks
from outrider.scripts.gpu_check.hardware import BACKENDS, bandwidth, machine, missing
from outrider.scripts.gpu_check.report import Report
from outrider.scripts.gpu_check.timing import time_transformers


def main(description: str) -> int:
    """Run all checks that this machine allows; return 1 if any failed or there is no GPU."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=checks.ROOT / "build" / "gpu-check")
    parser.add_argument("--large", action="store_true", help="time the large pair, and nothing else")
    options = parser.parse_args()
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    report = Report(out)
    if report.run("machine", machine) is not None:
        _check(report, out, options.large)
    report.write()
    print(f"\nwrote {out / 'gpu-check.json'} and {out / 'gpu-check.md'}")
    return 0 if report.passed else 1


def _check(report: Report, out: Path, large: bool) -> None:
    rate = report.run("copy bandwidth, GB/s", bandwidth)
    backends = []
    for backend in BACKENDS:
        reason = missing(backend)
        if reason:
            report.skip(backend, reason)
        else:
            backends.append(backend)
    if large:
        checks.check_large(report, out, rate, backends)
        return
    exports = checks.export_shipped_pair(report, out)
    for backend in backends:
        checks.check_backend(report, backend, out, exports, rate)
    report.run("transformers: timing", lambda: time_transformers(report, checks.PAIR, checks.PROMPT))
    report.run("tests marked gpu", checks.run_gpu_tests)
