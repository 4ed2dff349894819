"""Runs TensorRT's parser and builder in a child process, because both can crash.

The parent writes a `BuildJob` to the child's standard input, and keeps the pipe open: when it closes, the child exits. The
child answers with `BuildReport`s.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

import msgspec

from outrider.backends.tensorrt.job import PROGRESS_PARTS, BuildJob, BuildOptions, BuildReport, EngineFacts
from outrider.backends.tensorrt.package import Package
from outrider.engines.device import Cpu
from outrider.errors import EngineError, UsageError
from outrider.progress import SILENT, Progress

LOG_TAIL = 4000  # bytes
OUT_OF_MEMORY = (
    "bad_alloc",
    "out of memory",
    "outofmemory",
    "out_of_memory",
    "could not be allocated",
    "cannot allocate memory",
    "resource temporarily unavailable",  # no memory for a thread
)


def facts(package: Package, options: BuildOptions) -> EngineFacts:
    """Return the package's release and the GPUs that it can build for.

    Raises:
        UsageError: it does not support a compute capability in `options`.
        EngineError: it cannot be imported, or it needs a GPU to build and there is none.
    """
    result = _run(BuildJob(package, options), "asking for its version").facts
    assert result is not None
    if unknown := [each for each in options.compute_capability if each not in result.compute_capabilities]:
        raise UsageError(
            f"{package.title} {result.version} does not build for compute capability {unknown[0]!r}",
            f"use --compute-capability with some of {', '.join(result.compute_capabilities)}",
        )
    if not package.builds_anywhere and result.gpu is None:
        raise EngineError(
            f"there is no GPU here, and {package.title} builds on the GPU that will run the engine",
            "run this on that machine, or build anywhere with --backend tensorrt-rtx",
        )
    return result


def build_plan(job: BuildJob, name: str, sizes: str = "", progress: Progress = SILENT) -> None:
    """Build one engine.

    Args:
        name: the engine's name, for messages.
        sizes: the sizes that determine its memory, as text for messages.

    Raises:
        EngineError: TensorRT refuses the graph (the message names the node), runs out of memory, or crashes.
        OSError: the plan cannot be written.
    """
    progress.stage(f"building the {name}", PROGRESS_PARTS)
    _run(job, f"building the {name}", sizes, progress)


def _run(job: BuildJob, task: str, sizes: str = "", progress: Progress = SILENT) -> BuildReport:
    """Run a job in a child process, which never outlives this call, and return its last report."""
    stage, last = "starting", BuildReport()
    # -P: nothing is imported from the working directory.
    command = [sys.executable, "-P", "-m", "outrider.backends.tensorrt.child"]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if job.options.verbosity else log,
        ) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            with suppress(BrokenPipeError):  # it has already exited; the exit code shows why
                child.stdin.write(msgspec.json.encode(job) + b"\n")
                child.stdin.flush()
            for line in child.stdout:
                last = msgspec.json.decode(line, type=BuildReport)
                stage = last.stage or stage
                progress.advance(last.done)
            code = child.wait()
        finally:
            child.kill()
        log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL))
        tail = log.read().decode(errors="replace")
    if last.finished:
        return last
    raise _failure(job, task, stage, sizes, last, code, tail)


def _failure(job: BuildJob, task: str, stage: str, sizes: str, last: BuildReport, code: int, tail: str) -> Exception:
    """Return the exception for a child that ended with `code`, after `last`, and with `tail` at the end of its log."""
    title = job.package.title
    if last.missing:
        return EngineError(
            f"{title}'s builder cannot be imported: {last.missing}", f"pip install 'outrider[{job.package.extra}]'"
        )
    if last.errno:
        return OSError(last.errno, os.strerror(last.errno), job.plan)
    if code == -signal.SIGKILL or any(sign in (last.error + tail).lower() for sign in OUT_OF_MEMORY):
        free = f"{Cpu().memory()[0] / 2**30:.1f} GiB of memory are free"
        return EngineError(
            f"{title} ran out of memory while {task} ({stage}): {sizes}; {free}: {last.error or 'it was killed'}",
            "use a smaller --max-prompt-chunk, --batch, --capacity or --workspace, or fewer --k; or use a larger machine",
        )
    if last.error and stage == "parsing":
        return EngineError(
            f"{title}'s parser refuses the graph while {task}: {last.error}",
            "TensorRT does not support this node: choose another model from docs/models.md, or use --backend onnxruntime",
        )
    if last.error:
        return EngineError(
            f"{title} failed while {task} ({stage}): {last.error}",
            "export in another precision, build for other GPUs or with a larger --workspace, or use --backend onnxruntime;"
            " --verbosity info shows more",
        )
    end = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    last_line = f": {tail.strip().splitlines()[-1]}" if tail.strip() else ""
    return EngineError(
        f"{title} crashed while {task} ({stage}, {end}){last_line}",
        "build again with --verbosity verbose to see where; use another release of the package, or --backend onnxruntime",
    )
