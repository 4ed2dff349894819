"""Export a pair of checkpoints as a sealed folder of ONNX graphs, each checked against its checkpoint."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import msgspec
import numpy as np
import onnx_ir as ir
import torch
import transformers
from transformers import PreTrainedModel

import outrider
from outrider.backends.rewriting.sharing import share_with_target
from outrider.bundle.folder import digest_all, staged
from outrider.bundle.manifest import (
    CHAT_TEMPLATE,
    MANIFEST,
    SCHEMA_VERSION,
    TOKENIZER,
    Generation,
    Manifest,
    Model,
    model_file,
    sampler_file,
)
from outrider.engines.arrays import Floats
from outrider.engines.contract import CONTEXT, CONTRACT_VERSION
from outrider.engines.precisions import PRECISIONS
from outrider.engines.samplers import MARKOV, SAMPLERS
from outrider.errors import SourceError, UnsupportedModelError
from outrider.export.arguments import ExportArguments, ExportOptions
from outrider.export.checkpoints.checkpoint import (
    TokenizerFiles,
    generation_defaults,
    load_model,
    load_tokenizer,
    max_positions,
    read_config,
)
from outrider.export.checkpoints.source import CORRECT_CONFIG, MASK_TOKEN, Source
from outrider.export.checkpoints.vocabulary import check_same_vocabulary
from outrider.export.graph.sampler import sampler
from outrider.export.graph.step_model import FEATURE_MIXER, feature_mixer, trace
from outrider.export.heads.block_head import BlockCheckpoint, BlockHead
from outrider.export.heads.draft_head import DraftHead, HeadCheckpoint, Target
from outrider.export.heads.eagle3 import Eagle3Checkpoint
from outrider.export.heads.markov import export_markov
from outrider.export.heads.mtp import MtpCheckpoint, has_mtp
from outrider.export.heads.short_head import ShortHead, frequent_tokens, propose
from outrider.export.parity import (
    Exported,
    check_perplexity,
    compare,
    heldout_tokens,
    perplexity,
    reference,
    sample_features,
    sample_tokens,
)
from outrider.export.weights.quantize import pack, quantize_model
from outrider.export.weights.rounding import Rounding
from outrider.progress import SILENT, Progress

HEADS: dict[str, type[HeadCheckpoint[Any, Any]]] = {
    "head": Eagle3Checkpoint,
    "parallel-head": Eagle3Checkpoint,
    "block-head": BlockCheckpoint,
}
MODELS = ("draft", "parallel-draft")  # drafts that are language models
BLOCK = 6  # rows of a block that is compared, fewer than the last of `parity.CHUNKS`


def export_pair(
    target: str,
    draft: str | Sequence[str] | None,
    output: Path,
    *,
    progress: Progress = SILENT,
    **options: Unpack[ExportOptions],
) -> Manifest:
    """Export a target, and what drafts for it, into the folder `output`, and return the folder's manifest.

    Args:
        target: a Hugging Face folder, a hub id, or a GGUF file.
        draft: the same of a draft model, a parallel draft or a draft head, or several of them; None for the target alone.
        output: the folder to write.
        progress: is told about the stages.
        options: see `Options`.

    Raises:
        UsageError: options contradict each other, or do not fit the precision or the models.
        SourceError, UnsupportedModelError, VocabularyMismatchError, ParityError: the pair cannot be exported.
        FolderError: the output cannot be written.
    """
    drafts = [] if draft is None else [draft] if isinstance(draft, str) else draft
    return export(ExportArguments.check(target, drafts, output, **options), progress)


def export(arguments: ExportArguments, progress: Progress) -> Manifest:
    """Export what was asked for, one model in memory at a time, with a draft head beside each; the folder is written completely
    or not at all.

    Errors are those of `export_pair`.
    """
    rounding, shortening, precision = arguments.rounding, arguments.shortening, arguments.precision
    with staged(arguments.output) as folder, _quiet_libraries():
        (folder / sampler_file(MARKOV)).parent.mkdir()
        sources = arguments.sources()
        read_config(arguments.target)  # before its weights are asked for a head
        if arguments.own_head is None and has_mtp(arguments.target):
            progress.stage(f"drafting with the MTP head of {arguments.target.name}, which is the default")
            sources["head"] = arguments.target
        configs = {role: read_config(source) for role, source in sources.items() if role not in HEADS}
        masks = {role: _mask_token(sources[role], configs[role]) for role in ("parallel-draft",) if role in sources}
        of_head = next((role for role in HEADS if role in sources), None)
        head = _read_head(sources, of_head)
        progress.stage("reading the vocabularies")
        tokenizers = {role: load_tokenizer(source) for role, source in sources.items() if _has_tokenizer(role, source)}
        vocabulary = tokenizers["target"].vocabulary()
        vocab_tokens = max(check_same_vocabulary(vocabulary, each.vocabulary()) for each in tokenizers.values())
        tokens = max(vocabulary) + 1
        job = _Job(sources["target"], "target", tokenizers["target"], tokens, folder, precision, rounding, progress)
        model, defaults = _load(job)
        vocab_rows, drafter = _head_rows(model, job), None
        if head is not None:
            mixer, drafter = head.build(Target.of(model, job.source.name))
            model.add_module(FEATURE_MIXER, mixer.to(model.dtype))
        models = {"target": _export_model(job, model, vocab_rows)}
        del model
        own = rounding.for_draft(arguments.head_precision) if rounding is not None else None
        for role in [role for role in MODELS if role in sources]:
            job = _Job(sources[role], role, tokenizers[role], tokens, folder, precision, own, progress)
            if shortening is not None:
                short = frequent_tokens(job.tokenizer.json, *shortening, tokens, defaults.eos_token_ids)
                job = replace(job, short=short)
            models[role] = msgspec.structs.replace(_export_model(job, _load(job)[0], vocab_rows), mask_token=masks.get(role))
        if of_head is not None and head is not None and drafter is not None:
            own = replace(own, method="rtn") if own is not None else None  # there is no text to tune a head on
            job = _Job(sources[of_head], of_head, tokenizers["target"], tokens, folder, precision, own, progress)
            made = _export_model(job, drafter.to(getattr(torch, PRECISIONS[precision].dtype)), vocab_rows)
            further: dict[str, Any] = {"mask_token": head.config.mask_token}
            if isinstance(drafter, BlockHead):
                further |= {name: getattr(drafter, name) for name in ("block_state", "from_anchor", "trained_k")}
                if drafter.block_state is not None:
                    progress.stage("tracing the head's own heads")
                    export_markov(drafter, folder / sampler_file(MARKOV), vocab_rows, precision)
            models[of_head] = msgspec.structs.replace(made, **further)
            share_with_target(folder, models)
        _write_text(folder, tokenizers["target"])
        return _seal(folder, vocab_tokens, models, defaults, progress)


def _read_head(sources: dict[str, Source], role: str | None) -> HeadCheckpoint[Any, Any] | MtpCheckpoint | None:
    """Return the draft head, if there is one: the target's own where both come from one checkpoint."""
    if role is None:
        return None
    return MtpCheckpoint.read(sources[role]) if sources[role] is sources["target"] else HEADS[role].read(sources[role])


def _seal(folder: Path, vocab_tokens: int, models: dict[str, Model], generation: Generation, progress: Progress) -> Manifest:
    """Write the samplers and the manifest."""
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        contract_version=CONTRACT_VERSION,
        outrider_version=outrider.__version__,
        vocab_tokens=vocab_tokens,
        models=models,
        generation=generation,
        files={},
    )
    for name in SAMPLERS:
        if name in manifest.samplers:
            ir.save(sampler(name, manifest.vocab_rows), folder / sampler_file(name))
    manifest = msgspec.structs.replace(manifest, files=digest_all(folder, progress))
    (folder / MANIFEST).write_bytes(manifest.encode())
    return manifest


@dataclass(frozen=True, slots=True)
class _Job:
    """One model to export."""

    source: Source
    role: str
    tokenizer: TokenizerFiles
    tokens: int  # one more than the largest token id
    folder: Path
    precision: str
    rounding: Rounding | None  # None if weights are not quantized
    progress: Progress
    short: torch.Tensor | None = None  # int64 [N], the only tokens that the head keeps; None if it keeps all


def _has_tokenizer(role: str, source: Source) -> bool:
    """Return whether a checkpoint must have a tokenizer, or has one: most heads have none."""
    return role not in HEADS or source.file("tokenizer.json") is not None


def _load(job: _Job) -> tuple[PreTrainedModel, Generation]:
    """Load a model, and check the numbers of its configuration."""
    job.progress.stage(f"loading the {job.role}")
    model = load_model(job.source, job.precision)
    defaults = generation_defaults(model, job.tokenizer)
    _check_numbers(job.source.name, _head_rows(model, job), defaults, max_positions(model))
    return model, defaults


def _mask_token(source: Source, config: Any) -> int:
    """Return the token that stands for tokens not known yet, in the configuration of a parallel draft.

    Raises:
        SourceError: it is not one of the model's tokens.
    """
    token, embeddings = source.config()[MASK_TOKEN], config.get_text_config().vocab_size
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < embeddings:
        hint = "download the checkpoint again, or remove the entry to draft token by token"
        raise SourceError(f"{source.name} has the {MASK_TOKEN} {token!r}, and {embeddings:,} tokens", hint)
    return token


def _export_model(job: _Job, model: PreTrainedModel, rows: int) -> Model:
    """Trace, save and check one model, whose logits are to have so many rows."""
    role, rounding, progress = job.role, job.rounding, job.progress
    mixer, is_head = feature_mixer(model), isinstance(model, DraftHead)
    width = model.config.hidden_size if is_head else None if mixer is None else mixer.hidden_size
    architecture = type(model).__name__
    # A head's embedding is most often lent, and a step of it reads one row of that.
    lent = {id(parameter) for parameter in model.get_input_embeddings().parameters()} if is_head else set()
    parameters = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in lent)
    # A head's is often that of its training texts; rotary embeddings go on beyond it, at some loss of acceptance.
    positions, known = None if is_head else max_positions(model), _known(model, job, rows)
    quantization, pieces, reference_perplexity = None, list[torch.Tensor](), 0.0
    if rounding is not None and is_head:
        progress.stage(f"quantizing the {role}")
        quantization = quantize_model(model, rounding, job.tokenizer, positions)
    elif rounding is not None:
        pieces = heldout_tokens(job.tokenizer, positions)
        progress.stage(f"reading held-out text with the {role}")
        reference_perplexity = perplexity(_eager(model, pieces), pieces, known)
        progress.stage(f"quantizing the {role}")
        quantization = quantize_model(model, rounding, job.tokenizer, positions)
    sample = sample_tokens(job.tokens)
    if isinstance(model, BlockHead):
        sample[:, :-BLOCK] = CONTEXT  # the rest is the block, within the last chunk
    compared = (sample[0] != CONTEXT).numpy()
    progress.stage(f"running the {role}")
    features = sample_features(width) if is_head and width is not None else None
    expected = reference(model, sample, features)
    path, layout = job.folder / model_file(role), expected.layout
    if layout.recurrent and role != "target":
        raise UnsupportedModelError(
            f"{job.source.name} ({architecture}) keeps a recurrent state, which only targets may", "choose a draft without"
        )
    progress.stage(f"tracing the {role}")
    path.parent.mkdir(exist_ok=True)
    program = trace(model, layout, rows, rounding is not None, width, is_head)
    if rounding is not None:
        pack(program, model)
    program.save(path, external_data=True)
    del model, program
    gc.collect()
    progress.stage(f"checking the {role}'s graph against the checkpoint")
    actual, written = Exported(path, layout, job.precision, features=width).results(sample, features=features)
    assert np.isneginf(actual[:, ~known.numpy()]).all()  # these are constant, not computed
    want, got = (each[compared][:, known.numpy()] for each in (expected.logits, actual))
    parity = compare(want, got, job.precision)
    if expected.features is not None and written is not None:
        compare(expected.features, written, job.precision, "features")
    if pieces and rounding is not None:
        progress.stage(f"reading held-out text with the {role}'s graph")
        served = Exported(path, layout, job.precision, as_served=True, features=width)
        logits = (served.logits(piece, [piece.shape[1]]) for piece in pieces)
        parity = check_perplexity(parity, perplexity(logits, pieces, known), reference_perplexity, rounding)
    return Model(
        source=job.source.name,
        architecture=architecture,
        parameters=parameters,
        precision=job.precision,
        vocab_rows=rows,
        max_positions=positions,
        layers=layout.layers,
        recurrent=[*layout.recurrent],
        parity=parity,
        quantization=quantization,
        head_tokens=None if known.all() else int(known.sum()),
        features=width,
    )


def _known(model: PreTrainedModel, job: _Job, rows: int) -> torch.Tensor:
    """Make a draft propose tokens of the target's vocabulary only, and return which ones, bool [V]."""
    head = model.get_output_embeddings()
    if isinstance(head, ShortHead):  # a draft head comes with its tokens
        return head.place < head.rows.out_features
    own_rows = int(head.weight.shape[0])
    if job.short is None and own_rows == rows:
        return torch.ones(rows, dtype=torch.bool)
    tokens = torch.arange(min(rows, own_rows)) if job.short is None else job.short
    propose(model, tokens, rows)
    return torch.isin(torch.arange(rows), tokens)


def _check_numbers(name: str, rows: int, defaults: Generation, positions: int | None) -> None:
    """Refuse numbers of a configuration that no manifest may have."""
    if positions is not None and positions < 3:  # a round with one drafted token takes as many
        raise SourceError(f"{name} has {positions} positions (max_position_embeddings); it takes at least 3", CORRECT_CONFIG)
    for token in defaults.eos_token_ids:
        if not 0 <= token < rows:
            raise SourceError(
                f"{name} ends texts with token {token} (eos_token_id), and has {rows:,} rows of logits", CORRECT_CONFIG
            )


def _head_rows(model: PreTrainedModel, job: _Job) -> int:
    """Return the number of logits per token."""
    name = job.source.name
    head = model.get_output_embeddings()
    if head is None:
        raise UnsupportedModelError(f"{name} ({type(model).__name__}) has no output head")
    rows = int(head.weight.shape[0])
    if job.tokens > rows:
        raise UnsupportedModelError(
            f"{name} has {job.tokens:,} tokens but only {rows:,} rows of logits",
            f"remove the tokens from {rows} on from its tokenizer, or add rows: resize_token_embeddings of transformers",
        )
    return rows


def _eager(model: PreTrainedModel, pieces: list[torch.Tensor]) -> Iterator[Floats]:
    return (reference(model, piece).logits for piece in pieces)


def _write_text(folder: Path, tokenizer: TokenizerFiles) -> None:
    (folder / TOKENIZER).write_text(tokenizer.json, encoding="utf-8")
    if tokenizer.chat_template is not None:
        (folder / CHAT_TEMPLATE).write_text(tokenizer.chat_template, encoding="utf-8")


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Silence what torch and transformers report about their own internals."""
    bars = transformers.utils.logging.is_progress_bar_enabled()
    verbosity = transformers.utils.logging.get_verbosity()
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        transformers.utils.logging.set_verbosity(verbosity)
        if bars:
            transformers.utils.logging.enable_progress_bar()
