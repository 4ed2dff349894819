"""Types and helpers that all compared programs share: jobs, answers, and folders that are created once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

CONTEXT = 2048
THREADS = len(os.sched_getaffinity(0))
K = (1, 2, 3, 4)

Job = dict[str, Any]  # everything that the process of a program needs, as JSON
Arrivals = list[tuple[float, int]]
Answer = Callable[[list[int], int, Any], tuple[Arrivals, float | None]]
"""Answer a prompt's token ids with a number of new tokens at one k.

Returns the seconds since the request and the number of tokens for each time tokens arrived, and the mean acceptance length if
it does not follow from the arrivals.
"""


class Pair(NamedTuple):
    """The GGUF files of a target and its draft."""

    target: Path
    draft: Path


def make_once(path: Path, make: Callable[[Path], None]) -> Path:
    """Return a folder, and call `make` to create it if it does not exist. If `make` fails, no folder remains."""
    if not path.exists():
        print(f"making {path}", file=sys.stderr, flush=True)
        unfinished = path.with_name(path.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        make(unfinished)
        unfinished.rename(path)
    return path


def run(*command: object) -> None:
    """Run a command with its output on standard error."""
    subprocess.run([str(part) for part in command], check=True, stdout=sys.stderr)


def describe(settings: Job) -> str:
    """Describe settings in words."""
    words = [f"{settings['threads']} threads"] if "threads" in settings else []
    if "spinning" in settings:
        words.append("spinning" if settings["spinning"] else "no spinning")
    return ", ".join(words) or "default threads"
