"""What stages share: their folders, commands of `outrider`, and the checks of a backend."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from outrider.scripts.gpu_check.report import Report

ROOT = Path(__file__).resolve().parents[3]
PAIR = ROOT / "examples" / "tiny-pair"
PROMPT = "Customer: Hi, I would like to book a table for two in San Jose.\nAgent:"
COMMAND = [sys.executable, "-c", "from outrider.cli import main; main()"]
K = "1,2,4,8"
SIZES = ("--capacity", "512", "--max-prompt-chunk", "64")
PRECISION = "fp16"  # of the timing and the audit
PRECISIONS = (PRECISION, "fp32", "bf16")


@dataclass(frozen=True, slots=True)
class Folders:
    """Where a stage finds and leaves things that are not its report."""

    work: Path
    exports: Path  # one folder a precision: onnx-fp16, ...


def outrider(*arguments: str | Path) -> str:
    """Run a command of the package, and return its output.

    Raises:
        RuntimeError: it failed; with what it printed.
    """
    done = subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"outrider {arguments[0]} ended with {done.returncode}: {(done.stderr + done.stdout)[-600:]}")
    return done.stdout


def build(source: Path, bundle: Path, backend: str, *options: str) -> str:
    """Build a bundle anew."""
    shutil.rmtree(bundle, ignore_errors=True)  # from an earlier check
    device = ["--device", "cuda"] if backend == "onnxruntime" else []
    outrider("build-engine", source, "-o", bundle, "--backend", backend, "--k", K, *device, *options)
    return "built"


def check_engines(report: Report, backend: str, folders: Folders) -> list[str]:
    """Build the shipped pair in each precision, and compare every engine with ONNX Runtime on the CPU.

    Returns:
        the precisions that were built.
    """
    built = []
    for precision in PRECISIONS:
        source, bundle = folders.exports / f"onnx-{precision}", folders.work / f"{backend}-{precision}"
        if not source.exists():
            report.skip(f"{precision}: build", f"there is no {source}")
            continue
        if report.run(f"{precision}: build", partial(build, source, bundle, backend, *SIZES)) is None:
            continue
        built.append(precision)
        # ONNX Runtime has no bf16 kernels for CPUs.
        reference = folders.exports / "onnx-fp32" if precision == "bf16" else source
        report.run(f"{precision}: every engine against ONNX Runtime on the CPU", partial(_compare_engines, bundle, reference))
    return built


def _compare_engines(bundle: Path, export: Path) -> str:
    return outrider("verify", bundle, "--engines", export).splitlines()[-1]


def check_tests(report: Report, backend: str, folders: Folders) -> None:
    """Run the tests marked `gpu` of a backend."""

    def tests() -> str:
        file = f"{ROOT / 'tests' / 'test_gpu.py'}"
        options = ["-m", "gpu", "-k", f"{backend} or not (onnxruntime or tensorrt)", "--exports", str(folders.exports)]
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", *options, file], capture_output=True, text=True, cwd=ROOT)
        print(done.stdout[-4000:])
        summary = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-300:]
        if done.returncode:
            raise RuntimeError(summary)
        return summary

    report.run("tests marked gpu", tests)


def check_audit(report: Report, backend: str, folders: Folders) -> None:
    """Run the losslessness audit on a bundle for a batch of 4."""
    bundle = folders.work / f"{backend}-batched"

    def audit() -> str:
        build(folders.exports / f"onnx-{PRECISION}", bundle, backend, *SIZES, "--batch", "4")
        lines = outrider("verify", bundle).splitlines()
        return "; ".join(" ".join(line.split()) for line in lines if line.startswith(("greedy", "batched", "the bundle")))

    report.run("losslessness audit, batches of 4", audit)


def check_speed(report: Report, backend: str, folders: Folders) -> None:
    """Time plain and speculative decoding."""
    from outrider import Outrider  # these need packages that other stages do not
    from outrider.scripts.gpu_check.hardware import bandwidth
    from outrider.scripts.gpu_check.timing import time_bundle

    bundle = folders.work / f"{backend}-{PRECISION}"
    rate = report.run("copy bandwidth, GB/s", bandwidth)
    report.run("timing", lambda: time_bundle(report, backend, Outrider.load(bundle), PROMPT, rate))
