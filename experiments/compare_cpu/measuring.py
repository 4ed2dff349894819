"""Runs each program in a separate process, and finds the fastest settings of each peer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from outrider.experiments.compare_cpu.common import Job, K, describe
from outrider.experiments.compare_cpu.peers import PEERS, genai

Line = dict[str, Any]


class Contestant(NamedTuple):
    """A program with its settings."""

    name: str  # as in the report
    program: str  # a key of PROGRAMS
    settings: str  # in words
    job: Job


class Run(NamedTuple):
    """The figures of one answer."""

    tokens_per_second: float  # of the tokens after the first to arrive
    first: float  # seconds to the first token
    whole: float  # seconds to the last token
    length: float  # mean acceptance length: tokens per target pass


class Journal:
    """A record of the output of each process, so that a run of several hours can be stopped and resumed."""

    def __init__(self, path: Path, setup: dict[str, Any]):
        """Open or create the journal at `path`.

        Args:
            setup: the conditions that are the same for all jobs of a run, such as the machine and versions.
        """
        self.path, self.setup = path, setup
        self._recorded: dict[str, list[list[Line]]] = defaultdict(list)  # by job, the output of each process
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []  # the last may be cut off
        for line in lines:
            entry = json.loads(line)
            if entry["setup"] == setup:
                self._recorded[json.dumps(entry["job"])].append(entry["lines"])
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def run(self, job: Job, label: str) -> list[Line]:
        """Return the output of a process for this job: recorded output if there is any left, or else that of a new process."""
        if recorded := self._recorded[json.dumps(job)]:
            return recorded.pop(0)
        command = [sys.executable, "-P", "-m", "outrider.experiments.compare_cpu.worker"]  # -P: no imports from this folder
        done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{label} failed:\n{done.stderr[-2000:]}")
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"setup": self.setup, "job": job, "lines": lines}) + "\n")
        return lines


def measure(
    journal: Journal, contestant: Contestant, prompts: list[list[int]], tokens: int
) -> tuple[dict[Any, list[Run]], int]:
    """Return one process's runs by k, one per prompt, and its peak memory in bytes."""
    job = contestant.job | {"name": contestant.program, "prompts": prompts, "tokens": tokens}
    lines = journal.run(job, f"{contestant.name} ({contestant.settings})")
    runs: dict[Any, list[Run]] = defaultdict(list)
    for line in lines[:-1]:
        runs[line["k"]].append(figures(*line["answer"]))
    return runs, lines[-1]["peak"]


def figures(arrivals: Sequence[tuple[float, int]], length: float | None) -> Run:
    """Return the figures of an answer, computed from the arrival times of its tokens."""
    (first, count), (last, _) = arrivals[0], arrivals[-1]
    rest = sum(number for _, number in arrivals) - count
    return Run(rest / (last - first), first, last, length or rest / (len(arrivals) - 1))


def tune(journal: Journal, name: str, job: Job, prompts: list[list[int]], tokens: int) -> list[Contestant]:
    """Return a peer with its fastest settings for plain decoding and for each kind of drafting."""
    peer = PEERS[name]
    times = []
    for settings in peer.SETTINGS:
        contestant = Contestant(name, name, describe(settings), job | settings)
        runs, _ = measure(journal, contestant, prompts, tokens)
        for k, own in runs.items():
            seconds = geometric_mean(run.whole for run in own)
            times.append((seconds, k, settings))
            print(f"{name}, {describe(settings)}, k = {k}: {seconds:.2f} s", file=sys.stderr, flush=True)
    contestants = []
    for kind in dict.fromkeys(_kind(k) for _, k, _ in times):
        _, k, settings = min((each for each in times if _kind(each[1]) == kind), key=lambda each: each[0])
        ks = list(K) if k and name == genai.NAME else [k]  # GenAI at every k, like Outrider; the others are too slow to matter
        contestants.append(Contestant(name, name, describe(settings), job | settings | {"k": ks}))
    return contestants


def _kind(k: int | str) -> str:
    return "lookup" if isinstance(k, str) else "model" if k else "plain"
