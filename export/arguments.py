"""The arguments of an export, checked without importing torch and transformers, which takes seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict, Unpack

from outrider.bundle.folder import check_absent
from outrider.bundle.manifest import READS_FEATURES
from outrider.errors import UsageError, text_of
from outrider.export.as_is import UNQUANTIZED, default_precision
from outrider.export.checkpoints.adapters import Adapter
from outrider.export.checkpoints.source import MTP, NONE, Source
from outrider.export.weights.rounding import AS_IS, BITS, Rounding
from outrider.progress import Progress


class ExportOptions(TypedDict, total=False):
    """How the models of a pair are exported."""

    precision: str | None  # fp32, fp16, bf16, int8, int4, or as-is for what a quantized checkpoint stores; see `as_is.py`
    head_precision: str | None  # of the output head, for int8 and int4; with as-is, of what cannot be kept
    method: str | None  # how to round weights, rtn or auto-round, for int8 and int4
    calibration: Path | None  # a text file, for auto-round
    group_size: int | None  # the most inputs that share a scale: 32, 64 or 128, for int8 and int4
    draft_vocab: int | None  # how many tokens the draft can propose: the most frequent ones of `draft_vocab_text`
    draft_vocab_text: Path | None  # a text file
    chat_template: str | None  # instead of the target's own
    lora: Sequence[str | Adapter]  # of PEFT, to merge into the target: FOLDER or FOLDER=WEIGHT


@dataclass(frozen=True, slots=True)
class ExportArguments:
    """Checked arguments."""

    output: Path
    precision: str  # one of `PRECISIONS`; int4 for as-is
    asked: bool  # whether the precision was asked for; otherwise it is `default_precision` once the target is here
    head_precision: str | None
    target: Source
    drafts: list[Source]
    own_head: bool | None  # whether to draft with the target's MTP head; None to do so if there is one
    rounding: Rounding | None  # None if weights are not quantized
    shortening: tuple[Path, int] | None  # limit the draft to the most frequent tokens of this text, to this many
    chat_template: str | None  # instead of the target's own
    adapters: tuple[Adapter, ...]

    @classmethod
    def check(
        cls, target: str | Source, drafts: Sequence[str | Source], output: Path, **options: Unpack[ExportOptions]
    ) -> ExportArguments:
        """Check the arguments of `export_pair`, some of which may be parsed already.

        Raises:
            UsageError: options contradict each other, or do not fit the precision, or a text cannot be read.
            SourceError: a checkpoint does not exist, or an adapter cannot be read.
            UnsupportedModelError: an adapter is of a kind that is not merged.
            FolderError: the output exists.
        """
        rounding, head_precision = _rounding(options), options.get("head_precision")
        asked = options.get("precision")
        precision = rounding.precision if rounding else asked or UNQUANTIZED
        named = [draft for draft in drafts if draft != NONE]
        if NONE in drafts and len(drafts) > 1:
            raise UsageError(f"--draft {NONE} and another draft contradict each other", f"leave {NONE} out")
        shortening = _shortening(bool(named), options.get("draft_vocab"), options.get("draft_vocab_text"))
        check_absent(output)
        parsed = _parsed(target), [_parsed(draft) for draft in named if draft != MTP]
        own_head = MTP in named if drafts else None
        lora, template = options.get("lora", ()), options.get("chat_template")
        adapters = tuple(each if isinstance(each, Adapter) else Adapter.parse(each) for each in lora)
        choice = precision, asked is not None, head_precision
        return cls(output, *choice, *parsed, own_head, rounding, shortening, template, adapters)

    def with_default(self, progress: Progress) -> ExportArguments:
        """Return the arguments with the precision that suits the target, which is on this machine, unless one was asked for."""
        if self.asked:
            return self
        precision, why = default_precision(self.target, bool(self.adapters))
        if why:
            progress.stage(why)
        rounding = _rounding({"precision": precision})
        return replace(self, precision=rounding.precision if rounding else precision, rounding=rounding)

    def sources(self) -> dict[str, Source]:
        """Return the checkpoints by role, the target first. This may download their configurations.

        Raises:
            UsageError: two drafts are of the same kind, two are draft heads, or there is no draft model to shorten.
            SourceError: a configuration cannot be read.
        """
        sources = {"target": self.target} | ({"head": self.target} if self.own_head else {})
        for source in self.drafts:
            role = source.drafting_role()
            if role in sources:
                both = f"{sources[role].name} and {source.name}"
                raise UsageError(f"--draft has two drafts of the same kind: {both}", "choose one of them")
            sources[role] = source
        if len(heads := [sources[role].name for role in READS_FEATURES if role in sources]) > 1:
            raise UsageError(f"--draft has two draft heads: {' and '.join(heads)}", "choose one of them")
        if self.shortening is not None and not {"draft", "parallel-draft"} & sources.keys():
            raise UsageError("--draft-vocab is for draft models, not for draft heads", "leave --draft-vocab out")
        return sources


def _parsed(source: str | Source) -> Source:
    return source if isinstance(source, Source) else Source.parse(source)


def _rounding(options: ExportOptions) -> Rounding | None:
    precision, method, calibration = options.get("precision"), options.get("method"), options.get("calibration")
    if precision == AS_IS:
        if method is not None:
            raise UsageError(f"--method cannot be used with --precision {AS_IS}", "leave it out")
        precision, method = "int4", AS_IS
    if precision not in BITS:
        for name in ("head_precision", "method", "calibration", "group_size"):
            if options.get(name) is not None:
                option = f"--{name.replace('_', '-')}"
                how = f"with --precision {precision}" if precision else "without --precision"
                raise UsageError(f"{option} cannot be used {how}", "use --precision int4 or int8")
        return None
    if (method == "auto-round") != (calibration is not None):
        raise UsageError("--method auto-round and --calibration go together", "use both or neither")
    if method == "auto-round" and precision != "int4":
        raise UsageError("--method auto-round is for --precision int4", "leave it out: eight bits need no tuning")
    text = "" if calibration is None else text_of(calibration, "pass a UTF-8 text file as --calibration")
    return Rounding(precision, options.get("head_precision") or "int8", method or "rtn", text, options.get("group_size"))


def _shortening(has_draft: bool, tokens: int | None, text: Path | None) -> tuple[Path, int] | None:
    if (tokens is None) != (text is None):
        raise UsageError("--draft-vocab and --draft-vocab-text go together", "use both or neither")
    if tokens is None or text is None:
        return None
    if not has_draft:
        raise UsageError("--draft-vocab needs a draft model", "add one with --draft, or leave --draft-vocab out")
    text_of(text, "use a UTF-8 text similar to what the pair will write")
    return text, tokens
