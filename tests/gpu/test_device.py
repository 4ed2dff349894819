"""What `engines/cuda.py` promises, on a GPU and on a simulated one, and the costs that its design rests on.

On a GPU these tests need only NumPy, cuda-bindings and pytest.
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.engines.device import in_sequence, nothing
from outrider.errors import EngineError
from outrider.tests.gpu import broken, hardware

Record = Callable[[str, object], None]

GRAPHS = 64
KERNELS = 2000
REPEATS = 200
BYTES = 1 << 30  # copied to measure the bandwidth
SHOWS = "copies, recordings, memory and errors are as on the simulated device"


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a simulated device, for which every number is smaller."""
    from outrider.tests.gpu import simulated  # which needs packages that a check of the device layer does not

    monkeypatch.setattr(hardware, "fill", simulated.fill)
    monkeypatch.setattr(hardware, "copy", simulated.copy)
    for name, value in {"GRAPHS": 3, "KERNELS": 20, "REPEATS": 3, "BYTES": 1 << 10}.items():
        monkeypatch.setitem(globals(), name, value)
    return simulated.Simulated()


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu(SHOWS)), "simulated"])
def gpu(request: pytest.FixtureRequest) -> Any:
    if request.param == "simulated":
        return request.getfixturevalue("simulated")
    from outrider.engines.cuda import Cuda

    return Cuda()


def test_copies(gpu: Any) -> None:
    """Uploads, downloads, reads and writes, and copies of columns."""
    host, mirror = gpu.mirrored(1 << 20)
    values = np.random.default_rng(0).integers(0, 256, host.size, np.uint8)
    host[:] = values
    gpu.upload(host, mirror)()
    gpu.synchronize()
    host[:] = 0
    gpu.download(mirror, host)()
    gpu.synchronize()
    assert (host == values).all()
    wide, narrow = gpu.zeros((8, 64), "int64", "a check"), gpu.zeros((8, 5), "int64", "a check")
    gpu.write(wide, np.arange(512).reshape(8, 64))
    gpu.copy_columns(narrow, 1, wide, 60, 4)()
    assert (gpu.read(narrow)[:, 1:] == np.arange(512).reshape(8, 64)[:, 60:]).all()


def test_a_copy_from_another_device_waits_and_is_waited_for(gpu: Any) -> None:
    """It has what was computed there before it, and not what is computed there later, however far ahead the other one is.

    A second queue of the same GPU stands for another GPU.
    """
    other = type(gpu)()
    values, source = np.arange(1 << 20, dtype=np.uint8), other.zeros((1 << 20,), "uint8", "a check")
    host, mirror = other.mirrored(1 << 20)
    targets = [gpu.zeros((1 << 20,), "uint8", "a check") for _ in range(3)]
    host[:] = values
    for value, target in enumerate(targets):
        other.upload(host, mirror)()
        hardware.copy(other, source, mirror)()
        gpu.receive(target, source, other)()
        hardware.fill(other, source, value)()
    for target in targets:
        assert (gpu.read(target) == values).all()
    gpu.receive(targets[0], source, other)()
    hardware.fill(gpu, targets[0], 9)()
    assert (other.read(source) == 2).all()
    assert (gpu.read(targets[0]) == 9).all()


def test_a_replay_reads_what_the_host_memory_holds_then(gpu: Any) -> None:
    """Record an upload, a copy and a download, and replay them with other contents."""
    host, mirror = gpu.mirrored(256)
    answer, back = gpu.mirrored(256)
    launches = [gpu.upload(host, mirror), hardware.copy(gpu, back, mirror), gpu.download(back, answer)]
    for launch in launches:
        launch()
    replay = gpu.capture(launches)
    for value in (3, 200, 7):
        host[:] = value
        replay()
        gpu.synchronize()
        assert (answer == value).all()


def test_a_recording_has_the_work_of_another_device(gpu: Any) -> None:
    """A replay comes after what was launched on either before, and before what is launched on either later."""
    other = type(gpu)()
    (host, mirror), (answer, back) = gpu.mirrored(1 << 20), gpu.mirrored(1 << 20)
    there, own = (other.zeros((1 << 20,), "uint8", "a check") for _ in range(2))
    found = gpu.zeros((1 << 20,), "uint8", "a check")
    launches = [gpu.upload(host, mirror), other.receive(there, mirror, gpu), gpu.receive(back, there, other)]
    launches += [gpu.receive(found, own, other), gpu.download(back, answer)]
    for launch in launches:
        launch()
    replay = gpu.capture(launches)
    for value in (3, 200, 7):
        host[:] = value
        hardware.fill(other, own, value + 1)()
        replay()
        hardware.fill(other, own, 0)()
        gpu.synchronize()
        assert (answer == value).all()
        assert (gpu.read(found) == value + 1).all()


def test_a_recording_must_be_told_of_all_that_it_waits_for(gpu: Any) -> None:
    """Work that it does not wait for, and work that is not part of it, are errors."""
    other = type(gpu)()
    buffer = other.zeros((64,), "uint8", "a check")
    with pytest.raises(EngineError, match="cudaErrorStreamCaptureUnjoined"):
        gpu.record([other.follow(gpu), hardware.fill(other, buffer, 1)])
    with pytest.raises(EngineError, match="cudaErrorStreamCaptureIsolation"):
        gpu.record([gpu.follow(other)])
    for each in (gpu, other):
        works(each)


def works(gpu: Any) -> None:
    """Check that a launch and a recording still work."""
    buffer = gpu.zeros((64,), "uint8", "a check")
    gpu.capture([hardware.fill(gpu, buffer, 9)])()
    assert (gpu.read(buffer) == 9).all()


def test_an_exception_ends_a_recording(gpu: Any) -> None:
    def broken() -> None:
        raise EngineError("on purpose", "none")

    buffer = gpu.zeros((64,), "uint8", "a check")
    with pytest.raises(EngineError, match="on purpose"):
        gpu.capture([hardware.fill(gpu, buffer, 1), broken])
    works(gpu)


def test_garbage_that_owns_memory_is_not_freed_in_a_recording(gpu: Any) -> None:
    """Create many objects in a recording, so that the collector would run, while unreachable cycles own memory of the GPU."""
    for _ in range(10):
        cycle: list[Any] = [gpu.zeros((1024,), "uint8", "a check")]
        cycle.append(cycle)
        del cycle
    buffer = gpu.zeros((64,), "uint8", "a check")

    def many_objects() -> None:
        assert [[each] for each in range(100_000)]

    replay = gpu.capture([many_objects, hardware.fill(gpu, buffer, 4)])
    gc.collect()
    replay()
    assert (gpu.read(buffer) == 4).all()


def test_memory_freed_in_a_recording(gpu: Any, record_property: Record) -> None:
    """The runtime never does this. The report says how CUDA answers, and the device must work afterwards."""
    owned = [gpu.zeros((1024,), "uint8", "a check")]
    try:
        gpu.capture([owned.clear])
        record_property("free", "recorded")
    except EngineError as error:
        record_property("free", f"refused: {error}")
    works(gpu)


def test_a_second_thread(gpu: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(works, gpu).result()


def test_memory_of_recordings(gpu: Any, record_property: Record) -> None:
    """Record rounds of 100 kernels, as many as `Rounds` keeps."""
    buffer = gpu.zeros((4096,), "uint8", "a check")
    launches = [hardware.fill(gpu, buffer, value) for value in range(100)]
    gpu.capture(launches)()
    gpu.synchronize()
    before = gpu.memory()[0]
    replays = [gpu.capture(launches) for _ in range(GRAPHS)]
    for replay in replays:
        replay()
    gpu.synchronize()
    record_property(f"MiB of {GRAPHS} recordings", round((before - gpu.memory()[0]) / 2**20, 1))
    del replays, replay
    gc.collect()
    record_property("MiB after they were freed", round((before - gpu.memory()[0]) / 2**20, 1))


def test_too_large_an_allocation_is_refused(gpu: Any) -> None:
    with pytest.raises(EngineError, match="no memory for a check"):
        gpu.zeros((1 << 50,), "uint8", "a check")
    works(gpu)


def median_us(gpu: Any, action: Callable[[], object]) -> float:
    """Return the median microseconds of an action and a wait, after a warm-up."""
    times = []
    for _ in range(REPEATS + 10):
        gpu.synchronize()
        started = time.perf_counter()
        action()
        gpu.synchronize()
        times.append(time.perf_counter() - started)
    return round(1e6 * statistics.median(times[10:]), 1)


def test_latencies(gpu: Any, record_property: Record) -> None:
    """Time a wait, a launch, and copies of a round's size."""
    host, mirror = gpu.mirrored(4096)
    kernel, up, down = hardware.fill(gpu, mirror, 1), gpu.upload(host, mirror), gpu.download(mirror, host)
    replay = gpu.capture([up, kernel, down])
    gpu.synchronize()
    started = time.perf_counter()
    for _ in range(REPEATS):
        kernel()
    record_property("launch alone, µs", round(1e6 * (time.perf_counter() - started) / REPEATS, 1))
    for name, action in {
        "wait": nothing,
        "launch and wait": kernel,
        "upload 4 KiB": up,
        "download 4 KiB": down,
        "upload, kernel, download, recorded": replay,
        "the same as launches": in_sequence([up, kernel, down]),
    }.items():
        record_property(f"{name}, µs", median_us(gpu, action))


def test_recorded_kernels(gpu: Any, record_property: Record) -> None:
    """Time a small kernel, launched and recorded with others."""
    buffer = gpu.zeros((4096,), "uint8", "a check")
    launches = [hardware.fill(gpu, buffer, value % 256) for value in range(KERNELS)]
    record_property("launched, µs per kernel", round(median_us(gpu, in_sequence(launches)) / KERNELS, 2))
    record_property("recorded, µs per kernel", round(median_us(gpu, gpu.capture(launches)) / KERNELS, 2))


def test_bandwidth(gpu: Any, record_property: Record) -> None:
    record_property("copy bandwidth, GB/s", hardware.bandwidth(gpu, BYTES))


@pytest.mark.parametrize(
    ("check", "method", "wrong"),
    [
        (test_copies, "upload", lambda *_: nothing),
        (test_copies, "download", lambda *_: nothing),
        (test_copies, "copy_columns", lambda *_: nothing),
        (test_a_copy_from_another_device_waits_and_is_waited_for, "receive", lambda *_: nothing),
        (test_a_copy_from_another_device_waits_and_is_waited_for, "receive", broken.at_once),
        (test_a_copy_from_another_device_waits_and_is_waited_for, "receive", broken.without_telling),
        (test_a_replay_reads_what_the_host_memory_holds_then, "upload", broken.outdated),
        (test_a_replay_reads_what_the_host_memory_holds_then, "capture", lambda *_: nothing),
        (test_a_recording_has_the_work_of_another_device, "follow", lambda *_: nothing),
        (test_a_recording_has_the_work_of_another_device, "capture", broken.alone),
        (test_an_exception_ends_a_recording, "capture", broken.careless),
        (test_garbage_that_owns_memory_is_not_freed_in_a_recording, "capture", lambda *_: nothing),
        (test_a_second_thread, "capture", lambda *_: nothing),
        (test_too_large_an_allocation_is_refused, "zeros", lambda *_: None),
    ],
)
def test_a_broken_device_fails(
    check: Callable[[Any], None], method: str, wrong: Any, simulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(simulated), method, wrong)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(simulated)


def test_a_device_that_copies_nothing_fails(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "copy", lambda *_: nothing)
    with pytest.raises(AssertionError):
        test_a_replay_reads_what_the_host_memory_holds_then(simulated)


ONLY_NUMPY_AND_CUDA = """
import sys
for name in ("click", "msgspec", "onnx", "onnxruntime", "safetensors", "tokenizers", "torch", "transformers"):
    sys.modules[name] = None
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="shows what is said without a GPU")
def test_the_checks_of_a_gpu_need_numpy_and_the_bindings_only() -> None:
    command = [sys.executable, "-c", ONLY_NUMPY_AND_CUDA, "-rs", "-p", "no:cacheprovider", "-k", "cuda", __file__]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout
    assert "no NVIDIA GPU found" in done.stdout
    assert f"would show that {SHOWS}" in " ".join(done.stdout.split())
