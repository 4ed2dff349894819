"""The child process that `process` starts: it builds one engine, or reports the package's facts."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from outrider.backends.tensorrt.job import PROGRESS_PARTS, BuildJob, BuildReport, EngineFacts, Gpu, Refused
from outrider.backends.tensorrt.network import configure, create, import_polygraphy, parse, save_timing_cache
from outrider.errors import DeviceError

LONGEST = "Computing profile costs"  # TensorRT's phase of compiling, which takes nearly all of the time
NO_GPU = ("cudaError 35:", "cudaError 100:")  # both packages log these on every machine without a driver or GPU

Send = Callable[[BuildReport], None]


def main() -> None:
    """Read one job, run it, report on it, and exit."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent also receives it, and ends this process
    with open(os.dup(1), "wb", buffering=0) as reports:
        os.dup2(2, 1)  # keeps the libraries' output out of the reports

        def send(report: BuildReport) -> None:
            reports.write(msgspec.json.encode(report) + b"\n")

        job = msgspec.json.decode(sys.stdin.buffer.readline(), type=BuildJob)
        threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
        try:
            _work(job, send)
        except MemoryError as error:
            send(BuildReport(error=f"out of memory: {error}"))
        except OSError as error:
            send(BuildReport(error=str(error), errno=error.errno or 0))
        except Exception as error:
            send(BuildReport(error=str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"))
        sys.stderr.flush()
        os._exit(0)  # the libraries may crash in their shutdown


def _work(job: BuildJob, send: Send) -> None:
    try:
        trt = importlib.import_module(job.package.module)
        importlib.import_module("onnx")
        import_polygraphy(job.package)
    except (ImportError, OSError) as error:  # an OSError if one of the package's libraries is missing
        send(BuildReport(missing=str(error)))
        return
    if not job.graph:
        send(BuildReport(facts=_facts(trt, job), finished=True))
        return
    log = _logger(trt, job.options.verbosity)
    with open(job.plan, "wb") as plan:
        builder, network = create(trt, log)
        parser = trt.OnnxParser(network, log)
        send(BuildReport(stage="parsing"))
        parse(trt, job, network, parser)
        monitor = _monitor(trt, send)  # a reference, because the configuration does not keep it alive
        config = configure(trt, job, builder, network, monitor)
        send(BuildReport(stage="compiling"))
        _compile(trt, builder, network, config, plan, log.errors)
        save_timing_cache(job.options.timing_cache, config)
    send(BuildReport(finished=True))


def _facts(trt: Any, job: BuildJob) -> EngineFacts:
    names = sorted(getattr(getattr(trt, "ComputeCapability", None), "__members__", {}), key=lambda name: (len(name), name))
    capabilities = [f"{name[2:-1]}.{name[-1]}" for name in names if name.startswith("SM")]
    return EngineFacts(trt.__version__, capabilities, None if job.package.builds_anywhere else _gpu())


def _compile(trt: Any, builder: Any, network: Any, config: Any, plan: Any, errors: list[str]) -> None:
    """Write the plan, as a stream if the package can: that saves a second copy of a large model's weights."""
    if not hasattr(builder, "build_serialized_network_to_stream"):
        serialized = builder.build_serialized_network(network, config)
        if serialized is None:
            raise Refused(" ".join(errors) or "no reason given")
        plan.write(serialized)
        return

    failures: list[OSError] = []

    class Writer(trt.IStreamWriter):  # type: ignore[misc]
        def write(self, data: bytes) -> int:
            try:
                return int(plan.write(data))
            except OSError as error:  # an exception must not pass through the library
                failures.append(error)
                return 0

    built = builder.build_serialized_network_to_stream(network, config, Writer())
    if failures:
        raise failures[0]
    if not built:
        raise Refused(" ".join(errors) or "no reason given")


def _logger(trt: Any, verbosity: str | None) -> Any:
    levels = trt.ILogger.Severity
    shown = getattr(levels, verbosity.upper()) if verbosity else None

    class BuildLogger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if any(sign in message for sign in NO_GPU):
                return
            if severity <= levels.ERROR:
                self.errors.append(message)
            if shown is not None and severity <= shown:
                print(f"{severity.name.lower()}: {message}", file=sys.stderr, flush=True)

    return BuildLogger()


def _monitor(trt: Any, send: Send) -> Any:
    """Return a monitor that reports the progress of `LONGEST`.

    Phases are nested. Each counts as a share of the current step of its parent.
    """

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._phases: dict[str, list[int]] = {}  # finished and total steps of `LONGEST`, then of its nested phases
            self._reported = 0
            self._lock = threading.Lock()  # several threads call the monitor

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            with self._lock:
                if phase_name == LONGEST or parent_phase in self._phases:
                    self._phases[phase_name] = [0, max(num_steps, 1)]

        def step_complete(self, phase_name: str, step: int) -> bool:
            with self._lock:
                if phase_name in self._phases:
                    self._phases[phase_name][0] = step + 1
                share, done = 1.0, 0.0
                for steps, total in self._phases.values():
                    done += share * steps / total
                    share /= total
                if (parts := min(int(PROGRESS_PARTS * done), PROGRESS_PARTS)) > self._reported:
                    send(BuildReport(done=parts - self._reported))
                    self._reported = parts
            return True

        def phase_finish(self, phase_name: str) -> None:
            with self._lock:
                self._phases.pop(phase_name, None)

    return Monitor()


def _gpu() -> Gpu | None:
    """Return the first GPU; None if there is none. TensorRT's package has no such call."""
    try:
        from outrider.engines.cuda import Cuda

        device = Cuda()
    except DeviceError:
        return None
    return Gpu(device.name, device.compute_capability, device.memory()[0])


if __name__ == "__main__":
    main()
