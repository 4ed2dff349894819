"""Files of prompts by workload, with one `{"workload": ..., "prompt": ...}` per line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from outrider.errors import UsageError

SHIPPED = Path(__file__).with_name("workloads.jsonl")  # in the project's own words


class Prompt(msgspec.Struct, frozen=True):
    """A line of the file. Other fields are ignored."""

    workload: Annotated[str, msgspec.Meta(min_length=1)]
    prompt: Annotated[str, msgspec.Meta(min_length=1)]


def load(path: Path, each: int | None = None) -> list[Prompt]:
    """Return the prompts of a file, or only the first `each` of every workload.

    Raises:
        UsageError: the file cannot be read, a line is not a valid prompt, or the file has none.
    """
    taken: dict[str, int] = {}
    prompts = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", "pass a file of prompts") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt = msgspec.json.decode(line, type=Prompt)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(
                f"{path}, line {number}: {error}", 'make each line {"workload": "...", "prompt": "..."}'
            ) from error
        taken[prompt.workload] = taken.get(prompt.workload, 0) + 1
        if each is None or taken[prompt.workload] <= each:
            prompts.append(prompt)
    if not prompts:
        raise UsageError(f"{path} has no prompts", 'make each line {"workload": "...", "prompt": "..."}')
    return prompts
