"""Every error that Outrider raises on purpose.

OutriderError                  exit code 1: asked rightly, but it failed
├── SourceError                a checkpoint that cannot be read
├── UnsupportedModelError      a model that cannot be expressed as a step model
├── VocabularyMismatchError    draft and target do not share a vocabulary
├── ParityError                an exported graph does not give the checkpoint's numbers
├── FolderError                an export or bundle that is missing, damaged, newer, or cannot be written
├── EngineError                an engine that does not run, or gives logits that are no numbers
└── UsageError                 exit code 2: the request itself is wrong
"""

from __future__ import annotations


class OutriderError(Exception):
    """An expected failure: one line that says what happened, and one that says how to hint it."""

    exit_code = 1

    def __init__(self, message: str, hint: str, *, param: str | None = None):
        super().__init__(message)
        self.hint = hint
        self.param = param  # the request parameter at fault, by its name in `SamplingParams` or `Outrider.generate`


class SourceError(OutriderError):
    """A checkpoint that cannot be read."""


class UnsupportedModelError(OutriderError):
    """A model that cannot be expressed as a step model."""

    def __init__(self, message: str, hint: str = "choose a model of another architecture; docs/models.md lists what works"):
        super().__init__(message, hint)


class VocabularyMismatchError(OutriderError):
    """Draft and target do not share a vocabulary."""


class ParityError(OutriderError):
    """An exported graph does not give the checkpoint's numbers."""


class FolderError(OutriderError):
    """An export or bundle that is missing, damaged, of a newer schema, or cannot be written."""


class EngineError(OutriderError):
    """An engine that does not run, or whose logits are not numbers."""


class UsageError(OutriderError):
    """The request itself is wrong: a k that was not built, an empty prompt, a value out of range."""

    exit_code = 2


class OutriderWarning(UserWarning):
    """What works, but not as well as it could."""
