"""The exceptions that Outrider raises for expected failures.

OutriderError                  exit code 1: the request was valid, but it failed
├── SourceError                a checkpoint cannot be read
├── UnsupportedModelError      a model cannot be expressed as a step model
├── VocabularyMismatchError    draft and target do not share a vocabulary
├── ParityError                an exported graph does not reproduce the checkpoint's logits
├── FolderError                an export or bundle is missing, damaged, too new, or cannot be written
├── EngineError                an engine does not load or run, or its logits contain NaN or infinity
│   ├── DeviceError            this machine has no GPU that the engine can run on
│   └── StageError             a stage of the target in another process has failed, and its caches are lost
└── UsageError                 exit code 2: the request itself is wrong
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TextIO


class OutriderError(Exception):
    """An expected failure, with a hint on how to fix it."""

    exit_code = 1

    def __init__(self, message: str, hint: str, *, param: str | None = None):
        """Describe the failure.

        Args:
            message: one line that says what happened.
            hint: one line that says what to do about it.
            param: the request parameter at fault, by its name in `SamplingParams` or `Outrider.generate`; None if no
                single parameter is at fault.
        """
        super().__init__(message)
        self.hint = hint
        self.param = param

    def __reduce__(self) -> tuple[Callable[..., OutriderError], tuple[str, str], dict[str, object]]:
        """Let it pass to another process, as the hint is no argument of `Exception`."""
        return type(self), (str(self), self.hint), self.__dict__


class SourceError(OutriderError):
    """A checkpoint cannot be read."""


class UnsupportedModelError(OutriderError):
    """A model cannot be expressed as a step model."""

    def __init__(
        self,
        message: str,
        hint: str = "choose a model of another architecture; docs/models.md lists what works",
        *,
        param: str | None = None,
    ):
        super().__init__(message, hint, param=param)


class VocabularyMismatchError(OutriderError):
    """Draft and target do not share a vocabulary."""


class ParityError(OutriderError):
    """An exported graph does not reproduce the checkpoint's logits."""


class FolderError(OutriderError):
    """An export or bundle is missing, damaged, of a newer schema, or cannot be written."""


class EngineError(OutriderError):
    """An engine does not load or run, or its logits contain NaN or infinity."""


class DeviceError(EngineError):
    """This machine has no GPU or driver that the engine can run on. The engine may work on another machine."""


class StageError(EngineError):
    """A stage of the target in another process has failed, and its caches are lost. `Session.reopen` replaces it."""


class UsageError(OutriderError):
    """The request itself is wrong: a k that was not built, an empty prompt, a value out of range."""

    exit_code = 2


class OutriderWarning(UserWarning):
    """Something works, but not as well as it could."""


def show_warnings(show: Callable[[str], None]) -> None:
    """Pass the text of Outrider's warnings to `show`. Drop the warnings of other libraries, which are for developers."""

    def showwarning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, OutriderWarning):
            show(str(message))

    warnings.showwarning = showwarning


def text_of(path: Path, hint: str) -> str:
    """Return the text of a UTF-8 file; raises `UsageError` with the hint if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {reason_of(error)}", hint) from error


def reason_of(error: BaseException) -> str:
    """Return an exception's message in one line, or its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__
