"""Export a pair of checkpoints as a sealed folder of ONNX graphs, each checked against its checkpoint."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import msgspec
import onnx_ir as ir
import torch
import transformers

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
    sampler_file,
)
from outrider.engines.contract import CONTRACT_VERSION
from outrider.engines.precisions import PRECISIONS
from outrider.engines.samplers import MARKOV, SAMPLERS
from outrider.errors import SourceError
from outrider.export.arguments import ExportArguments, ExportOptions
from outrider.export.checkpoints.checkpoint import read_config
from outrider.export.checkpoints.outlines import without_bars
from outrider.export.checkpoints.source import MASK_TOKEN, Source
from outrider.export.checkpoints.streamed import Streamed
from outrider.export.checkpoints.tokenizer import load_tokenizer
from outrider.export.checkpoints.vocabulary import check_same_vocabulary
from outrider.export.graph.features import FEATURE_MIXER
from outrider.export.graph.sampler import sampler
from outrider.export.heads.block_head import BlockCheckpoint
from outrider.export.heads.draft_head import HeadCheckpoint, Target
from outrider.export.heads.eagle3 import Eagle3Checkpoint
from outrider.export.heads.markov import export_markov
from outrider.export.heads.mtp import MtpCheckpoint, has_mtp
from outrider.export.heads.short_head import frequent_tokens
from outrider.export.model import ModelJob, export_model, head_rows, load
from outrider.progress import SILENT, Progress

HEADS: dict[str, type[HeadCheckpoint[Any, Any]]] = {
    "head": Eagle3Checkpoint,
    "parallel-head": Eagle3Checkpoint,
    "block-head": BlockCheckpoint,
}
MODELS = ("draft", "parallel-draft")  # drafts that are language models


def export_pair(
    target: str,
    draft: str | Sequence[str] | None,
    output: Path,
    *,
    progress: Progress = SILENT,
    **options: Unpack[ExportOptions],
) -> Manifest:
    """Export a target and its drafts into the folder `output`, and return the folder's manifest.

    Args:
        target: a Hugging Face folder, a hub id, or a GGUF file.
        draft: a draft model, a parallel draft or a draft head, or several of them; None for the target alone.
        output: the folder to write.
        progress: receives the stages.
        options: see `ExportOptions`.

    Raises:
        UsageError: options contradict each other, or do not fit the precision or the models.
        SourceError, UnsupportedModelError, VocabularyMismatchError, ParityError: the pair cannot be exported.
        FolderError: the output cannot be written.
    """
    drafts = [] if draft is None else [draft] if isinstance(draft, str) else draft
    return export(ExportArguments.check(target, drafts, output, **options), progress)


def export(arguments: ExportArguments, progress: Progress) -> Manifest:
    """Export a pair. The folder is written completely or not at all.

    Only a layer or two of one model are in memory at a time, plus a draft head. `--method auto-round` needs the whole model.

    Raises the errors of `export_pair`.
    """
    with staged(arguments.output) as folder, _quiet_libraries():
        (folder / sampler_file(MARKOV)).parent.mkdir()
        for adapter in arguments.adapters:
            adapter.source.download(progress)
            adapter.contents()  # before downloads that take longer
        for source in (arguments.target, *arguments.drafts):
            source.download(progress)
        sources = arguments.sources()
        read_config(arguments.target)  # before looking for a head in its weights
        arguments = arguments.with_default(progress)
        rounding, shortening, precision = arguments.rounding, arguments.shortening, arguments.precision
        if arguments.own_head is None and has_mtp(arguments.target):
            progress.stage(f"drafting with the MTP head of {arguments.target.name}, which is the default")
            sources["head"] = arguments.target
        configs = {role: read_config(source) for role, source in sources.items() if role not in HEADS}
        parallel = sources.get("parallel-draft")
        mask_token = None if parallel is None else _mask_token(parallel, configs["parallel-draft"])
        head_role = next((role for role in HEADS if role in sources), None)
        head = None if head_role is None else _read_head(sources, head_role)
        progress.stage("reading the vocabularies")
        tokenizers = {role: load_tokenizer(source) for role, source in sources.items() if _has_tokenizer(role, source)}
        vocabulary = tokenizers["target"].vocabulary()
        vocab_tokens = max(check_same_vocabulary(vocabulary, each.vocabulary()) for each in tokenizers.values())
        tokens = max(vocabulary) + 1
        job = ModelJob(sources["target"], "target", tokenizers["target"], tokens, folder, precision, rounding, progress)
        job = replace(job, adapters=arguments.adapters)
        model, weights, defaults = load(job)
        vocab_rows, drafter = head_rows(model, job), None
        if head is not None:
            weights.keep(model.get_input_embeddings(), model.get_output_embeddings())  # a head may use the same
            mixer, drafter = head.build(Target.of(model, job.source.name))
            model.add_module(FEATURE_MIXER, mixer.to(model.dtype))
        models = {"target": export_model(job, model, weights, vocab_rows)}
        job = replace(job, adapters=())
        del model, weights
        draft_rounding = None if rounding is None else rounding.for_draft(arguments.head_precision)
        for role in [role for role in MODELS if role in sources]:
            job = replace(job, source=sources[role], role=role, tokenizer=tokenizers[role], rounding=draft_rounding)
            if shortening is not None:
                job = replace(job, short=frequent_tokens(job.tokenizer.json, *shortening, tokens, defaults.eos_token_ids))
            made = export_model(job, *load(job)[:2], vocab_rows)
            models[role] = msgspec.structs.replace(made, mask_token=mask_token if role == "parallel-draft" else None)
        if head_role is not None and drafter is not None:
            if draft_rounding is not None:
                draft_rounding = replace(draft_rounding, method="rtn")  # there is no text to tune a head on
            source, tokenizer = sources[head_role], tokenizers["target"]
            job = ModelJob(source, head_role, tokenizer, tokens, folder, precision, draft_rounding, progress)
            drafter = drafter.to(getattr(torch, PRECISIONS[precision].dtype))
            models[head_role] = export_model(job, drafter, Streamed(folder), vocab_rows)
            if drafter.block_state is not None:
                progress.stage("tracing the Markov and confidence heads")
                export_markov(drafter, folder / sampler_file(MARKOV), vocab_rows, precision)
            share_with_target(folder, models)
        (folder / TOKENIZER).write_text(tokenizers["target"].json, encoding="utf-8")
        if (template := arguments.chat_template or tokenizers["target"].chat_template) is not None:
            (folder / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
        return _seal(folder, vocab_tokens, models, defaults, progress)


def _read_head(sources: dict[str, Source], role: str) -> HeadCheckpoint[Any, Any] | MtpCheckpoint:
    """Return the draft head; it is the target's MTP head if both come from one checkpoint."""
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


def _has_tokenizer(role: str, source: Source) -> bool:
    """Return whether to read a checkpoint's tokenizer: most heads have none."""
    return role not in HEADS or source.file("tokenizer.json") is not None


def _mask_token(source: Source, config: Any) -> int:
    """Return the mask token in the configuration of a parallel draft.

    Raises:
        SourceError: the mask token is not one of the model's tokens.
    """
    token, embeddings = source.config()[MASK_TOKEN], config.get_text_config().vocab_size
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < embeddings:
        hint = "download the checkpoint again, or remove the entry to draft token by token"
        raise SourceError(f"{source.name} has the {MASK_TOKEN} {token!r}, which is none of its {embeddings:,} tokens", hint)
    return token


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Silence torch's and transformers' messages about their own internals."""
    verbosity = transformers.utils.logging.get_verbosity()
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    transformers.utils.logging.set_verbosity_error()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), without_bars():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        transformers.utils.logging.set_verbosity(verbosity)
