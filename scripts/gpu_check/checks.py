"""What is checked of each backend: builds, engines, audit, timing, and the tests marked `gpu`."""

from __future__ import annotations

import shutil
import subprocess
import sys
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
        arguments = ("--target", PAIR / "target", "--draft", PAIR / "draft", "--precision", precision, "-o", folder)
        if folder.exists() or report.run(f"export, {precision}", lambda a=arguments: outrider("export", *a) and "exported"):  # type: ignore[misc]
            exports[precision] = folder
    return exports


def check_backend(report: Report, backend: str, out: Path, exports: dict[str, Path], rate: float | None) -> None:
    """Check a backend with the shipped pair in each precision."""
    sizes = ("--capacity", "512", "--max-prompt-chunk", "64")
    for precision, source in exports.items():
        name, bundle = f"{backend}, {precision}", out / f"{backend}-{precision}"
        if report.run(f"{name}: build", lambda s=source, b=bundle: build(s, b, backend, *sizes)) is None:  # type: ignore[misc]
            continue
        reference = exports.get("fp32", source) if precision == "bf16" else source  # ONNX Runtime has no bf16 kernels for CPUs
        item = f"{name}: every engine against ONNX Runtime on the CPU"
        report.run(item, lambda b=bundle, r=reference: check_engines(b, r))  # type: ignore[misc]
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
        export = ("--target", folder / "target", "--draft", folder / "draft", "--precision", PRECISION, "-o", folder / "onnx")
        report.run("large pair: export", lambda: outrider("export", *export, timeout=1200) and "exported")
    for backend in backends:
        bundle = folder / backend

        def time_large(backend: str = backend, bundle: Path = bundle) -> str:
            loaded = Outrider.load(bundle)
            loaded.loop.rounds = ForcedAcceptance(loaded.loop.rounds, ACCEPTANCE)
            name = f"{backend}, 7B and 0.5B, random weights, acceptance forced to {ACCEPTANCE}"
            return time_bundle(report, name, loaded, "the quick brown fox", rate)

        report.run(
            f"large pair, {backend}: build",
            lambda b=bundle, name=backend: build(folder / "onnx", b, name, timeout=1200),  # type: ignore[misc]
        )
        report.run(f"large pair, {backend}: timing", time_large)


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
