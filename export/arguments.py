"""What an export is asked for, checked as far as that goes without torch and transformers, which take seconds to import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.bundle.folder import check_absent
from outrider.errors import UsageError
from outrider.export.rounding import Rounding
from outrider.export.source import Source


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of an export that agree with each other."""

    sources: dict[str, Source]  # by role; without a draft, the target alone
    rounding: Rounding | None  # None if weights are not quantized
    shortening: tuple[Path, int] | None  # the text whose most frequent tokens the draft may propose, and their number

    @classmethod
    def check(
        cls,
        target: str,
        draft: str | None,
        output: Path,
        *,
        precision: str,
        head_precision: str | None = None,
        method: str | None = None,
        calibration: Path | None = None,
        draft_vocab: int | None = None,
        draft_vocab_text: Path | None = None,
    ) -> Arguments:
        """Check the arguments of `export_pair`.

        Raises:
            UsageError: options contradict each other, or do not fit the precision, or a text cannot be read.
            SourceError: a checkpoint is not there.
            FolderError: the output exists.
        """
        rounding = Rounding.from_options(precision, head_precision, method, calibration)
        shortening = _shortening(draft, draft_vocab, draft_vocab_text)
        sources = {role: Source.parse(name) for role, name in (("target", target), ("draft", draft)) if name is not None}
        check_absent(output)
        return cls(sources, rounding, shortening)


def _shortening(draft: str | None, tokens: int | None, text: Path | None) -> tuple[Path, int] | None:
    if (tokens is None) != (text is None):
        raise UsageError("--draft-vocab and --draft-vocab-text go together", "use both or neither")
    if tokens is None or text is None:
        return None
    if draft is None:
        raise UsageError("--draft-vocab needs a draft", "add --draft, or leave --draft-vocab out")
    try:
        text.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read {text} as text: {error}", "use a UTF-8 text similar to what the pair will write"
        ) from error
    return text, tokens
