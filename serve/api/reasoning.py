"""Separates what a model thinks, between marks at the beginning of its answer, from what it says."""

from __future__ import annotations

from typing import Any, NamedTuple

from outrider.runtime.text.stream import TOKEN_MARK
from outrider.serve.tools.base import overlap

# Qwen3, DeepSeek-R1, GLM-4.5 and most others; Seed-OSS. Both marks are tokens of the vocabulary, and are not special.
MARKS = (("<think>", "</think>"), ("<seed:think>", "</seed:think>"))
TAIL = 16  # characters behind a mark at the end of a prompt, all of them white space


class Split(NamedTuple):
    """Parts of a text, by their names in the API."""

    reasoning_content: str
    content: str


def marks_of(tokenizer: Any) -> tuple[str, str] | None:
    """Return the marks that a tokenizer has as tokens, if there are any."""
    return next((marks for marks in MARKS if all(tokenizer.token_to_id(mark) is not None for mark in marks)), None)


def opened(opening: str, prompt: str) -> bool:
    """Return whether the end of a prompt has opened the reasoning."""
    return prompt[-len(opening) - TAIL :].rstrip().endswith(opening)


class ReasoningSplitter:
    """Splits one answer as it comes. White space at the beginning of either part is dropped."""

    def __init__(self, marks: tuple[str, str], prompt: str):
        """Begin after a prompt, whose end may have opened the reasoning already; each mark may have a `TOKEN_MARK`."""
        self._opening, self._closing = marks
        # None until the answer's first mark or word.
        self._inside: bool | None = opened(self._opening.removeprefix(TOKEN_MARK), prompt) or None
        self._held = ""
        self._begun = False  # whether the current part has text

    def push(self, text: str, last: bool = False) -> Split:
        """Return what more of each part is known; nothing is held back behind the `last` text."""
        self._held += text
        reasoning = ""
        if self._inside is None:
            start = self._held.lstrip()
            if start.startswith(self._opening):
                self._inside, self._held = True, start.removeprefix(self._opening)
            elif not last and self._opening.startswith(start):
                return Split("", "")
            else:
                self._inside = False
                self._begun = True  # an answer without reasoning is left as it is
        if self._inside:
            before, mark, after = self._held.partition(self._closing)
            if not mark:
                kept = 0 if last else overlap(before, self._closing)
                before, after = before[: len(before) - kept], before[len(before) - kept :]
            reasoning, self._held = self._clean(before), after
            if not mark:
                return Split(reasoning, "")
            self._inside = self._begun = False
        content, self._held = self._clean(self._held), ""
        return Split(reasoning, content)

    def _clean(self, text: str) -> str:
        text = text if self._begun else text.lstrip()
        self._begun = self._begun or bool(text)
        return text
