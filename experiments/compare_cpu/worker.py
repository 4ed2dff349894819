"""The process of one program: reads a job on standard input, and writes its answers to standard output as JSON lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil

from outrider.experiments.compare_cpu.common import Job
from outrider.experiments.compare_cpu.peers import PROGRAMS


def work(job: Job) -> None:
    """Answer all prompts at each k of the job. Then write the peak memory in bytes, including that of child processes."""
    answer = PROGRAMS[job["name"]].load(job)
    for k in job["k"]:
        answer(job["prompts"][0][:16], 8, k)  # warm-up
        for ids in job["prompts"]:
            print(json.dumps({"k": k, "answer": answer(ids, job["tokens"], k)}), flush=True)
    process = psutil.Process()
    print(json.dumps({"peak": sum(peak_bytes(each.pid) for each in (process, *process.children()))}), flush=True)


def peak_bytes(pid: int) -> int:
    """Return the peak memory of a process, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


if __name__ == "__main__":
    work(json.load(sys.stdin))
