"""The process of one program: reads a job on standard input, and writes its answers to standard output as JSON lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from outrider.scripts.compare_cpu.common import Job
from outrider.scripts.compare_cpu.peers import PROGRAMS


def work(job: Job) -> None:
    """Answer all prompts at each k of the job in turn, then write the peak memory of this process in bytes."""
    answer = PROGRAMS[job["name"]].load(job)
    for k in job["k"]:
        answer(job["prompts"][0][:16], 8, k)  # warm-up
        for ids in job["prompts"]:
            print(json.dumps({"k": k, "answer": answer(ids, job["tokens"], k)}), flush=True)
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"peak": peak}), flush=True)


if __name__ == "__main__":
    work(json.load(sys.stdin))
