"""The processor, and how many threads engines may use on it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def thread_count() -> int:
    """Return the size of the thread pool that all engines of a process share: `OMP_NUM_THREADS`, or the cores it may use."""
    setting = os.environ.get("OMP_NUM_THREADS", "")
    if setting.isdecimal() and int(setting) > 0:
        return int(setting)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_name() -> str:
    """Return the name of the processor, or of its architecture if it has none."""
    lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines() if CPUINFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
