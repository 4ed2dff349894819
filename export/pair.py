"""Export a pair of checkpoints as a sealed folder of ONNX graphs, each checked against its checkpoint."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import msgspec
import numpy as np
import onnx_ir as ir
import torch
import transformers
from transformers import PreTrainedModel

import outrider
from outrider.bundle.folder import digest_all, staged
from outrider.bundle.manifest import (
    CHAT_TEMPLATE,
    MANIFEST,
    SCHEMA_VERSION,
    TOKENIZER,
    Generation,
    Manifest,
    Model,
    Parity,
    model_file,
    sampler_file,
)
from outrider.engines.arrays import Floats
from outrider.engines.contract import CONTRACT_VERSION
from outrider.errors import SourceError, UnsupportedModelError
from outrider.export.arguments import Arguments, Options
from outrider.export.checkpoint import TokenizerFiles, generation_defaults, load_model, load_tokenizer, read_config
from outrider.export.parity import (
    Exported,
    check_perplexity,
    compare,
    heldout_tokens,
    perplexity,
    reference,
    sample_tokens,
)
from outrider.export.quantize import pack, quantize_model
from outrider.export.rounding import Rounding
from outrider.export.sampler import sampler
from outrider.export.short_head import frequent_tokens, shorten
from outrider.export.source import Source
from outrider.export.step_model import trace
from outrider.export.vocabulary import check_same_vocabulary
from outrider.progress import SILENT, Progress


def export_pair(
    target: str, draft: str | None, output: Path, *, progress: Progress = SILENT, **options: Unpack[Options]
) -> Manifest:
    """Export both models of a pair, or a target alone, into the folder `output`, and return its manifest.

    Args:
        target: a Hugging Face folder, a hub id, or a GGUF file.
        draft: the same, or None.
        output: the folder to write.
        progress: is told about the stages.
        options: see `Options`.

    Raises:
        UsageError: options contradict each other, or do not fit the precision or the models.
        SourceError, UnsupportedModelError, VocabularyMismatchError, ParityError: the pair cannot be exported.
        FolderError: the output cannot be written.
    """
    return export(Arguments.check(target, draft, output, **options), progress)


def export(arguments: Arguments, progress: Progress) -> Manifest:
    """Export what was asked for, one model in memory at a time; the folder is written completely or not at all.

    Errors are those of `export_pair`.
    """
    sources, rounding, shortening = arguments.sources, arguments.rounding, arguments.shortening
    precision = arguments.precision
    with staged(arguments.output) as folder, _quiet_libraries():
        for source in sources.values():
            read_config(source)
        progress.stage("reading the vocabularies")
        tokenizers = {role: load_tokenizer(source) for role, source in sources.items()}
        vocabulary = tokenizers["target"].vocabulary()
        vocab_tokens = max(check_same_vocabulary(vocabulary, each.vocabulary()) for each in tokenizers.values())
        tokens = max(vocabulary) + 1
        job = _Job(sources["target"], "target", tokenizers["target"], tokens, folder, precision, rounding, None, progress)
        entry, generation = _export_model(job)
        models = {"target": entry}
        for role in sources.keys() - models.keys():
            short = None
            if shortening is not None:
                short = frequent_tokens(tokenizers[role].json, *shortening, tokens, generation.eos_token_ids)
            own = rounding.for_draft(arguments.head_precision) if rounding is not None else None
            job = _Job(sources[role], role, tokenizers[role], tokens, folder, precision, own, short, progress)
            models[role], _ = _export_model(job)
        _write_text(folder, tokenizers["target"])
        return _seal(folder, vocab_tokens, models, generation, progress)


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
    for name in manifest.samplers:
        path = folder / sampler_file(name)
        path.parent.mkdir(exist_ok=True)
        ir.save(sampler(name, *manifest.widths), path)
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
    short: torch.Tensor | None  # int64 [N], the only tokens that the head keeps; None if it keeps all
    progress: Progress


def _export_model(job: _Job) -> tuple[Model, Generation]:
    """Load, trace, save and check one model. All memory that it takes is free again afterwards."""
    role, rounding, progress = job.role, job.rounding, job.progress
    progress.stage(f"loading the {role}")
    model = load_model(job.source, job.precision)
    rows = _head_rows(model, job)
    defaults = generation_defaults(model, job.tokenizer)
    architecture = type(model).__name__
    parameters = sum(parameter.numel() for parameter in model.parameters())
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    _check_numbers(job.source.name, rows, defaults, positions)
    known = torch.ones(rows, dtype=torch.bool)
    if job.short is not None:
        shorten(model, job.short)
        known = torch.isin(torch.arange(rows), job.short)
    quantization, pieces, reference_perplexity = None, list[torch.Tensor](), 0.0
    if rounding is not None:
        pieces = heldout_tokens(job.tokenizer, positions)
        progress.stage(f"reading held-out text with the {role}")
        reference_perplexity = perplexity(_eager(model, pieces), pieces, known)
        progress.stage(f"quantizing the {role}")
        quantization = quantize_model(model, rounding, job.tokenizer, positions)
    sample = sample_tokens(job.tokens)
    progress.stage(f"running the {role}")
    expected, layers = reference(model, sample)
    path = job.folder / model_file(role)
    _trace(model, layers, path, job)
    del model
    gc.collect()
    parity = _check_logits(path, layers, expected, sample, known, job)
    if rounding is not None:
        progress.stage(f"reading held-out text with the {role}'s graph")
        served = Exported(path, layers, job.precision, as_served=True)
        logits = (served.logits(piece, [piece.shape[1]]) for piece in pieces)
        parity = check_perplexity(parity, perplexity(logits, pieces, known), reference_perplexity, rounding)
    entry = Model(
        source=job.source.name,
        architecture=architecture,
        parameters=parameters,
        precision=job.precision,
        vocab_rows=rows,
        max_positions=positions,
        layers=layers,
        parity=parity,
        quantization=quantization,
        head_tokens=None if job.short is None else len(job.short),
    )
    return entry, defaults


def _check_numbers(name: str, rows: int, defaults: Generation, positions: int | None) -> None:
    """Refuse numbers of a configuration that no manifest may have."""
    hint = "correct the checkpoint's config.json and generation_config.json, or download it again"
    if positions is not None and positions < 3:  # a round with one drafted token takes as many
        raise SourceError(f"{name} has {positions} positions (max_position_embeddings); it takes at least 3", hint)
    for token in defaults.eos_token_ids:
        if not 0 <= token < rows:
            raise SourceError(f"{name} ends texts with token {token} (eos_token_id), and has {rows:,} rows of logits", hint)


def _head_rows(model: PreTrainedModel, job: _Job) -> int:
    """Return the number of logits per token."""
    name = job.source.name
    head = model.get_output_embeddings()
    if head is None:
        raise UnsupportedModelError(f"{name} ({type(model).__name__}) has no output head")
    rows = int(head.weight.shape[0])
    if job.tokens > rows:
        raise UnsupportedModelError(f"{name} has {job.tokens:,} tokens but only {rows:,} rows of logits")
    return rows


def _trace(model: PreTrainedModel, layers: list[tuple[int, int, int]], path: Path, job: _Job) -> None:
    job.progress.stage(f"tracing the {job.role}")
    path.parent.mkdir()
    program = trace(model, layers, spare_row=job.rounding is not None)
    if job.rounding is not None:
        pack(program, model)
    program.save(path, external_data=True)


def _check_logits(
    path: Path,
    layers: list[tuple[int, int, int]],
    expected: Floats,
    sample: torch.Tensor,
    known: torch.Tensor,
    job: _Job,
) -> Parity:
    job.progress.stage(f"checking the {job.role}'s graph against the checkpoint")
    actual = Exported(path, layers, job.precision).logits(sample)
    assert np.isneginf(actual[:, ~known.numpy()]).all()  # these are constant, not computed
    return compare(expected[:, known.numpy()], actual[:, known.numpy()], job.precision)


def _eager(model: PreTrainedModel, pieces: list[torch.Tensor]) -> Iterator[Floats]:
    return (reference(model, piece)[0] for piece in pieces)


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
