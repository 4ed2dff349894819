"""Separates a model's reasoning, between marks at the start of its answer, from the content."""

from __future__ import annotations

from typing import Any, NamedTuple

from outrider.runtime.text.stream import TOKEN_MARK
from outrider.serve.tools.base import overlap

# Qwen3, DeepSeek-R1, GLM-4.5 and most others; Seed-OSS. The marks are tokens of the vocabulary, but not special tokens.
MARKS = (("<think>", "</think>"), ("<seed:think>", "</seed:think>"))
TAIL = 16  # maximum length of the white space after a mark at the end of a prompt


class Split(NamedTuple):
    """The two parts of a text, named as in the API."""

    reasoning_content: str
    content: str


def marks_of(tokenizer: Any) -> tuple[str, str] | None:
    """Return the pair of marks that a tokenizer has as tokens; None if it has none."""
    return next((marks for marks in MARKS if all(tokenizer.token_to_id(mark) is not None for mark in marks)), None)


def opened(opening: str, prompt: str) -> bool:
    """Return whether a prompt ends with the opening mark of the reasoning."""
    return prompt[-len(opening) - TAIL :].rstrip().endswith(opening)


class ReasoningSplitter:
    """Splits one answer as it arrives. White space at the start of either part is dropped."""

    def __init__(self, marks: tuple[str, str], prompt: str):
        """Start after a prompt, which may end with the opening mark. Each mark may start with `TOKEN_MARK`."""
        self._opening, self._closing = marks
        # Whether the text is reasoning; None until the answer's first mark or word.
        self._inside: bool | None = opened(self._opening.removeprefix(TOKEN_MARK), prompt) or None
        self._held = ""
        self._begun = False  # whether the current part has text

    def push(self, text: str, last: bool = False) -> Split:
        """Return the new text of each part that is known after more text. After the `last` text nothing is held back."""
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
                self._begun = True  # an answer without reasoning stays unchanged
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
