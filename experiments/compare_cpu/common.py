"""Types and helpers for all compared programs: jobs, answers, and folders that are created once."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from outrider.engines.threads import thread_count

CONTEXT = 2048
THREADS = thread_count()
K = (1, 2, 3, 4)

Job = dict[str, Any]  # the input of a program's process, as JSON
Arrivals = list[tuple[float, int]]
AnswerFunction = Callable[[list[int], int, Any], tuple[Arrivals, float | None]]
"""A function that answers a prompt's token ids with a number of new tokens at one k.

It returns the arrivals, which are the seconds since the request and the number of tokens whenever tokens arrived. It also
returns the mean acceptance length, or None if that follows from the arrivals.
"""


class PairFiles(NamedTuple):
    """The GGUF files of a target and its draft."""

    target: Path
    draft: Path


def make_once(path: Path, make: Callable[[Path], None]) -> Path:
    """Return a folder, and call `make` to create it if it does not exist. If `make` fails, no folder remains."""
    if not path.exists():
        print(f"creating {path}", file=sys.stderr, flush=True)
        unfinished = path.with_name(path.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        make(unfinished)
        unfinished.rename(path)
    return path


def package_version(name: str) -> str | None:
    """Return the version of a Python package, or None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def run(*command: object) -> None:
    """Run a command, and send its output to standard error."""
    subprocess.run([str(part) for part in command], check=True, stdout=sys.stderr)


def describe(settings: Job) -> str:
    """Describe settings in words."""
    words = [f"{settings['threads']} threads"] if "threads" in settings else []
    if "spinning" in settings:
        words.append("spinning" if settings["spinning"] else "no spinning")
    if "group" in settings:
        words.append(f"groups of {settings['group']}")
    if "hint" in settings:
        words.append(settings["hint"])
    return ", ".join(words) or "default threads"
