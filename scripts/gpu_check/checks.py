"""What is checked of each backend: builds, engines, audit, timing, and the tests marked `gpu`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from outrider import Outrider
from outrider.scripts.gpu_check.large_pair import ACCEPTANCE, write_large_pair
from outrider.scripts.gpu_check.report import Report
from outrider.scripts.gpu_check.timing import ForcedAcceptance, time_bundle

ROOT = Path(__file__).resolve().parents[2]
PAIR = ROOT / "examples" / "tiny-pair"
PROMPT = "Customer: Hi, I would like to book a table for two in San Jose.\nAgent:"
COMMAND = [sys.executable, "-c", "from outrider.cli import main; main()"]
K = "1,2,4,8"
PRECISION = "fp16"  # of the timing and the audit
PRECISIONS = (PRECISION, "bf16", "fp32")


def outrider(*arguments: str | Path, timeout: float = 240) -> str:
    """Run an `outrider` command, and return its output.

    Raises:
        RuntimeError: it failed; with what it printed.
    """
    done = subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise RuntimeError(f"outrider {arguments[0]} ended with {done.returncode}: {(done.stderr + done.stdout)[-600:]}")
    return done.stdout


def export(pair: Path, folder: Path, precision: str, timeout: float = 240) -> str:
    """Export the checkpoints `target` and `draft` of a folder."""
    models = ("--target", pair / "target", "--draft", pair / "draft")
    outrider("export", *models, "--precision", precision, "-o", folder, timeout=timeout)
    return "exported"


def build(source: Path, bundle: Path, backend: str, *options: str, timeout: float = 240) -> str:
    """Build a bundle anew."""
    shutil.rmtree(bundle, ignore_errors=True)  # from an earlier check
    device = ["--device", "cuda"] if backend == "onnxruntime" else []
    outrider("build-engine", source, "-o", bundle, "--backend", backend, "--k", K, *device, *options, timeout=timeout)
    return "built"


def check_engines(bundle: Path, export: Path) -> str:
    """Compare every engine with ONNX Runtime on the CPU."""
    return outrider("verify", bundle, "--engines", export).splitlines()[-1]


def audit(bundle: Path) -> str:
    """Run the losslessness audit, and return its verdicts."""
    lines = outrider("verify", bundle, timeout=600).splitlines()
    return "; ".join(" ".join(line.split()) for line in lines if line.startswith(("greedy", "batched", "the bundle")))


def export_shipped_pair(report: Report, out: Path) -> dict[str, Path]:
    """Export the shipped pair in each precision, and return the folders of the exports that succeeded."""
    exports = {}
    for precision in PRECISIONS:
        folder = out / f"onnx-{precision}"
        if not folder.exists():
            report.run(f"export, {precision}", partial(export, PAIR, folder, precision))
        if folder.exists():
            exports[precision] = folder
    return exports


def check_backend(report: Report, backend: str, out: Path, exports: dict[str, Path], rate: float | None) -> None:
    """Check a backend with the shipped pair in each precision."""
    sizes = ("--capacity", "512", "--max-prompt-chunk", "64")
    for precision, source in exports.items():
        name, bundle = f"{backend}, {precision}", out / f"{backend}-{precision}"
        if report.run(f"{name}: build", partial(build, source, bundle, backend, *sizes)) is None:
            continue
        reference = exports.get("fp32", source) if precision == "bf16" else source  # ONNX Runtime has no bf16 kernels for CPUs
        report.run(f"{name}: every engine against ONNX Runtime on the CPU", partial(check_engines, bundle, reference))
    if PRECISION in exports and (out / f"{backend}-{PRECISION}").exists():
        bundle, batched = out / f"{backend}-{PRECISION}", out / f"{backend}-batched"
        report.run(f"{backend}: timing", lambda: time_bundle(report, backend, Outrider.load(bundle), PROMPT, rate))
        built = report.run(
            f"{backend}: build for a batch of 4", lambda: build(exports[PRECISION], batched, backend, *sizes, "--batch", "4")
        )
        report.run(f"{backend}: losslessness audit", lambda: audit(batched if built else bundle))


def check_large(report: Report, out: Path, rate: float | None, backends: list[str]) -> None:
    """Time a pair of random weights in the shape of a 7B target and a 0.5B draft."""
    folder = out / "large"
    if not (folder / "onnx").exists():
        report.run("large pair: random weights", lambda: write_large_pair(folder, PAIR / "target"))
        report.run("large pair: export", partial(export, folder, folder / "onnx", PRECISION, timeout=1200))
    for backend in backends:
        bundle = folder / backend
        report.run(f"large pair, {backend}: build", partial(build, folder / "onnx", bundle, backend, timeout=1200))
        report.run(f"large pair, {backend}: timing", partial(_time_large, report, backend, bundle, rate))


def _time_large(report: Report, backend: str, bundle: Path, rate: float | None) -> str:
    loaded = Outrider.load(bundle).observed(ForcedAcceptance(ACCEPTANCE))
    name = f"{backend}, 7B and 0.5B, random weights, acceptance forced to {ACCEPTANCE}"
    return time_bundle(report, name, loaded, "the quick brown fox", rate)


def run_gpu_tests() -> str:
    """Run the tests marked `gpu`, and return pytest's summary.

    Raises:
        RuntimeError: a test failed.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", str(ROOT / "tests" / "test_gpu.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=ROOT)
    print(done.stdout[-4000:])
    summary = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-300:]
    if done.returncode:
        raise RuntimeError(summary)
    return summary
