"""How many threads engines may use on the CPU."""

from __future__ import annotations

import os


def thread_count() -> int:
    """Return the size of the thread pool that all engines of a process share: `OMP_NUM_THREADS`, or the cores it may use."""
    setting = os.environ.get("OMP_NUM_THREADS", "")
    if setting.isdecimal() and int(setting) > 0:
        return int(setting)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
