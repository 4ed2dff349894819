"""Reads the texts to train on: prompts, conversations or plain texts."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from outrider.errors import UsageError

LINES = (".jsonl", ".jsonl.gz")


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: str
    content: str


class Sample(msgspec.Struct, frozen=True):
    """One line of a file: a conversation, a user's prompt or a plain text. Other keys are ignored."""

    messages: list[ChatMessage] | None = None
    prompt: str | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        if sum(each is not None for each in (self.messages, self.prompt, self.text)) != 1:
            raise ValueError("it needs exactly one of messages, prompt and text")
        if not (self.messages or self.prompt or self.text):
            raise ValueError("it is empty")


def read_texts(paths: Sequence[Path]) -> list[Sample]:
    """Read files of JSON lines (`.jsonl`, `.jsonl.gz`), and plain text files, which are one sample each.

    Raises:
        UsageError: a file cannot be read, or one of its lines is not a sample.
    """
    return [sample for path in paths for sample in _read(path)]


def _read(path: Path) -> Iterator[Sample]:
    number = 0
    try:
        if not path.name.endswith(LINES):
            yield Sample(text=path.read_text(encoding="utf-8"))
            return
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as lines:
            for line in lines:
                number += 1
                if line.strip():
                    yield msgspec.json.decode(line, type=Sample)
    except (OSError, EOFError, ValueError, RecursionError, msgspec.DecodeError) as error:  # from files, gzip, UTF-8 and JSON
        where = f"line {number} of {path}" if number else str(path)
        hint = 'use text, or JSON lines with {"messages": [...]}, {"prompt": "..."} or {"text": "..."}'
        raise UsageError(f"cannot read {where}: {' '.join(str(error).split())}", hint, param="texts") from error
