"""The command line of `scripts/gpu-check`: stages, each in a process of its own and with a time limit."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from outrider.scripts.gpu_check.report import Report, summarize
from outrider.scripts.gpu_check.stages import STAGES
from outrider.scripts.gpu_check.stages.base import ROOT, Folders


def main(description: str) -> int:
    """Run the stages that are asked for, and return 1 if an item failed or a stage did not end."""
    stages = "\n".join(f"  {stage.name:18} {stage.title}" for stage in STAGES.values())
    parser = argparse.ArgumentParser(
        description=f"{description}\nstages:\n{stages}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", action="append", choices=STAGES, help="run this stage; may be repeated [all but large-pair]")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-check", help="folder of the report")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "gpu-check-work", help="folder of bundles")
    parser.add_argument("--exports", type=Path, help="folder of ready-made exports [WORK/exports]")
    parser.add_argument("--limit", type=float, default=600, help="seconds of a stage [600]")
    parser.add_argument("--inside", choices=STAGES, help=argparse.SUPPRESS)  # the process of one stage
    options = parser.parse_args()
    folders = Folders(options.work, options.exports or options.work / "exports")
    for folder in (options.out, options.work):
        folder.mkdir(parents=True, exist_ok=True)
    if options.inside:
        return _inside(options.inside, options.out, folders)
    for name in options.stage or [name for name in STAGES if name != "large-pair"]:
        run_stage(name, options.out, folders, options.limit)
        summarize(options.out, STAGES)
    passed = summarize(options.out, STAGES)
    print(f"\nwrote {options.out / 'gpu-check.json'} and {options.out / 'gpu-check.md'}")
    return 0 if passed else 1


def run_stage(name: str, out: Path, folders: Folders, limit: float) -> None:
    """Run one stage in a process of its own, whose report says so if it hangs or crashes."""
    print(f"\n=== {name}: {STAGES[name].title}", flush=True)
    (out / f"{name}.json").unlink(missing_ok=True)
    command = [sys.executable, str(ROOT / "scripts" / "gpu-check"), "--inside", name, "--out", str(out)]
    command += ["--work", str(folders.work), "--exports", str(folders.exports)]
    reason = None
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            if code := process.wait(limit):
                reason = None if code == 1 else f"the stage ended with {code}"
        except subprocess.TimeoutExpired:
            reason = f"the stage did not end in {limit:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with all that the stage has started
    if reason is not None:
        Report(out, name).fail("the stage", reason)


def _inside(name: str, out: Path, folders: Folders) -> int:
    stage, report = STAGES[name], Report(out, name)
    if not stage.needs_gpu or report.run("machine", _machine) is not None:
        stage.check(report, folders)
    return 0 if report.passed else 1


def _machine() -> dict[str, str]:
    from outrider.scripts.gpu_check.hardware import machine  # which needs a package that the stage of exports does not

    return machine()
