"""The device layer alone: copies, recorded launches, and what they cost. Needs only NumPy and cuda-bindings."""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from outrider.engines.cuda import Cuda
from outrider.engines.device import nothing
from outrider.errors import EngineError
from outrider.scripts.gpu_check.hardware import bandwidth, copy, fill
from outrider.scripts.gpu_check.report import Report
from outrider.scripts.gpu_check.stages.base import Folders

GRAPHS = 64
KERNELS = 2000
REPEATS = 200


def check(report: Report, folders: Folders) -> None:
    """Check what `engines/cuda.py` promises, and measure the costs that its design rests on."""
    check_device(report, Cuda())


def check_device(report: Report, gpu: Cuda) -> None:
    """Check a device that behaves as a GPU does."""
    for name, item in (
        ("copies, whole and by columns", copies),
        ("a replay reads the host's memory of its own time", replay_reads_host_memory),
        ("an exception ends a recording, and the stream goes on", exception_while_recording),
        ("garbage that owns memory of the GPU outlives a recording", garbage_while_recording),
        ("memory freed in a recording", free_while_recording),
        ("a second thread", second_thread),
        (f"memory of {GRAPHS} recorded rounds of 100 kernels", memory_of_graphs),
        ("an error leaves the device usable", error_and_go_on),
        ("microseconds", latencies),
        (f"{KERNELS} kernels, microseconds each", recorded_kernels),
        ("copy bandwidth, GB/s", bandwidth),
    ):
        report.run(name, partial(item, gpu))


def expect(condition: object, message: str) -> None:
    """Raise `RuntimeError` unless a condition holds."""
    if not condition:
        raise RuntimeError(message)


def copies(gpu: Cuda) -> str:
    """Check uploads, downloads, reads and writes, and copies of columns."""
    host, mirror = gpu.mirrored(1 << 20)
    values = np.random.default_rng(0).integers(0, 256, host.size, np.uint8)
    host[:] = values
    gpu.upload(host, mirror)()
    gpu.synchronize()
    host[:] = 0
    gpu.download(mirror, host)()
    gpu.synchronize()
    expect((host == values).all(), "what came back is not what was sent")
    wide, narrow = gpu.zeros((8, 64), "int64", "a check"), gpu.zeros((8, 5), "int64", "a check")
    gpu.write(wide, np.arange(512).reshape(8, 64))
    gpu.copy_columns(narrow, 1, wide, 60, 4)()
    expect((gpu.read(narrow)[:, 1:] == np.arange(512).reshape(8, 64)[:, 60:]).all(), "columns were copied wrongly")
    return "equal"


def replay_reads_host_memory(gpu: Cuda) -> str:
    """Record an upload, a copy and a download, and replay them with other contents."""
    host, mirror = gpu.mirrored(256)
    answer, back = gpu.mirrored(256)
    launches = [gpu.upload(host, mirror), copy(gpu, back, mirror), gpu.download(back, answer)]
    for launch in launches:
        launch()
    replay = gpu.capture(launches)
    for value in (3, 200, 7):
        host[:] = value
        replay()
        gpu.synchronize()
        expect((answer == value).all(), f"a replay gave {answer[0]} for {value}")
    return "equal"


def _works(gpu: Cuda) -> None:
    """Check that a launch and a recording still work."""
    buffer = gpu.zeros((64,), "uint8", "a check")
    replay = gpu.capture([fill(gpu, buffer, 9)])
    replay()
    expect((gpu.read(buffer) == 9).all(), "the device does not work any more")


def exception_while_recording(gpu: Cuda) -> str:
    """Raise an exception between the launches of a recording."""

    def broken() -> None:
        raise EngineError("on purpose", "none")

    buffer = gpu.zeros((64,), "uint8", "a check")
    try:
        gpu.capture([fill(gpu, buffer, 1), broken])
    except EngineError as error:
        expect(str(error) == "on purpose", f"another exception came: {error}")
    else:
        raise RuntimeError("the exception did not come")
    _works(gpu)
    return "it came, and the stream works"


def garbage_while_recording(gpu: Cuda) -> str:
    """Let the collector's threshold be passed inside a recording, while unreachable cycles own memory of the GPU."""
    for _ in range(10):
        cycle: list[Any] = [gpu.zeros((1024,), "uint8", "a check")]
        cycle.append(cycle)
        del cycle
    buffer = gpu.zeros((64,), "uint8", "a check")

    def many_objects() -> None:
        objects = [[each] for each in range(100_000)]
        expect(objects, "")

    replay = gpu.capture([many_objects, fill(gpu, buffer, 4)])
    gc.collect()
    replay()
    expect((gpu.read(buffer) == 4).all(), "the replay did nothing")
    return "recorded"


def free_while_recording(gpu: Cuda) -> str:
    """Free memory of the GPU inside a recording, which the runtime never does, and say what CUDA makes of it."""
    owned = [gpu.zeros((1024,), "uint8", "a check")]
    try:
        gpu.capture([owned.clear])
        answer = "recorded all the same"
    except EngineError as error:
        answer = f"refused: {error}"
    _works(gpu)
    return answer


def second_thread(gpu: Cuda) -> str:
    """Launch, record and replay in another thread than the one that made the device."""
    failures: list[BaseException] = []

    def work() -> None:
        try:
            _works(gpu)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return "works"


def memory_of_graphs(gpu: Cuda) -> str:
    """Return the memory that as many recorded rounds take as `Rounds` keeps."""
    buffer = gpu.zeros((4096,), "uint8", "a check")
    launches = [fill(gpu, buffer, value) for value in range(100)]
    gpu.capture(launches)()
    gpu.synchronize()
    before = gpu.memory()[0]
    replays = [gpu.capture(launches) for _ in range(GRAPHS)]
    for replay in replays:
        replay()
    gpu.synchronize()
    taken = before - gpu.memory()[0]
    del replays, replay
    gc.collect()
    return f"{taken / 2**20:.1f} MiB, {(before - gpu.memory()[0]) / 2**20:.1f} MiB after they were freed"


def error_and_go_on(gpu: Cuda) -> str:
    """Ask for more memory than there is, and go on."""
    try:
        gpu.zeros((1 << 50,), "uint8", "a check")
    except EngineError as error:
        _works(gpu)
        return str(error)
    raise RuntimeError("a petabyte was allocated")


def median_us(gpu: Cuda, action: Callable[[], object]) -> float:
    """Return the median microseconds of an action with a wait, after a warm-up."""
    times = []
    for _ in range(REPEATS + 10):
        gpu.synchronize()
        started = time.perf_counter()
        action()
        gpu.synchronize()
        times.append(time.perf_counter() - started)
    return round(1e6 * statistics.median(times[10:]), 1)


def latencies(gpu: Cuda) -> dict[str, float]:
    """Return what a wait, a launch, and copies of a round's size take."""
    host, mirror = gpu.mirrored(4096)
    kernel, up, down = fill(gpu, mirror, 1), gpu.upload(host, mirror), gpu.download(mirror, host)
    replay = gpu.capture([up, kernel, down])
    gpu.synchronize()
    started = time.perf_counter()
    for _ in range(REPEATS):
        kernel()
    queued = (time.perf_counter() - started) / REPEATS
    return {
        "wait": median_us(gpu, nothing),
        "launch and wait": median_us(gpu, kernel),
        "launch alone": round(1e6 * queued, 1),
        "upload 4 KiB": median_us(gpu, up),
        "download 4 KiB": median_us(gpu, down),
        "upload, kernel, download, recorded": median_us(gpu, replay),
        "the same as launches": median_us(gpu, lambda: (up(), kernel(), down())),
    }


def recorded_kernels(gpu: Cuda) -> dict[str, float]:
    """Return what a small kernel takes as a launch, and recorded with the others."""
    buffer = gpu.zeros((4096,), "uint8", "a check")
    launches = [fill(gpu, buffer, value % 256) for value in range(KERNELS)]
    replay = gpu.capture(launches)

    def all_launches() -> None:
        for launch in launches:
            launch()

    times = {"launched": median_us(gpu, all_launches), "recorded": median_us(gpu, replay)}
    return {name: round(time / KERNELS, 2) for name, time in times.items()}
