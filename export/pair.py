"""`outrider export`: a checkpoint pair becomes an ONNX pair, checked and sealed."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
    model_file,
    sampler_file,
)
from outrider.engines.contract import CONTRACT_VERSION
from outrider.engines.session import Floats
from outrider.errors import UnsupportedModelError, UsageError
from outrider.export.parity import (
    Exported,
    check_perplexity,
    compare,
    heldout_tokens,
    perplexity,
    reference,
    sample_tokens,
)
from outrider.export.quantize import Rounding, pack, quantize_model
from outrider.export.sampler import sampler
from outrider.export.short_head import frequent_tokens, shorten
from outrider.export.source import Source, TokenizerFiles, generation_defaults, load_model, load_tokenizer, read_config
from outrider.export.step_model import trace
from outrider.export.vocabulary import check_same_vocabulary
from outrider.progress import SILENT, Progress


def export_pair(
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
    progress: Progress = SILENT,
) -> Manifest:
    """Export both models of a pair, or a target alone, into the folder `output`, and return its manifest.

    One model is in memory at a time. The folder is written whole or not at all. `head_precision`, `method` and
    `calibration`, a text, are for int4 and int8 (`Rounding`). The draft proposes only the `draft_vocab` tokens that
    `draft_vocab_text` has most.

    Raises:
        UsageError: options that do not go with the precision, with the models, or with each other.
        SourceError, UnsupportedModelError, VocabularyMismatchError, ParityError: the pair cannot be exported.
        FolderError: the output cannot be written.
    """
    rounding = Rounding.asked(precision, head_precision, method, calibration)
    if (draft_vocab is None) != (draft_vocab_text is None):
        raise UsageError("--draft-vocab and --draft-vocab-text go together", "give the number and a text to count tokens in")
    if draft is None and draft_vocab is not None:
        raise UsageError("--draft-vocab is for a draft, and there is none", "give --draft, too, or leave it out")
    sources = {role: Source.parse(name) for role, name in (("target", target), ("draft", draft)) if name is not None}
    with staged(output) as folder, _quiet_libraries():
        for source in sources.values():
            read_config(source)
        progress.stage("reading the vocabularies")
        tokenizers = {role: load_tokenizer(source) for role, source in sources.items()}
        vocabulary = tokenizers["target"].vocabulary()
        count = max(check_same_vocabulary(vocabulary, each.vocabulary()) for each in tokenizers.values())
        models: dict[str, Model] = {}
        generation = None
        for role, source in sources.items():
            path, tokens = folder / model_file(role), max(vocabulary) + 1
            short = None
            if role == "draft" and draft_vocab is not None and draft_vocab_text is not None:
                assert generation is not None
                ends = generation.eos_token_ids
                short = frequent_tokens(tokenizers[role].json, draft_vocab_text, draft_vocab, tokens, ends)
            rounded = rounding.of_draft(head_precision) if rounding is not None and role == "draft" else rounding
            models[role], defaults = _export_model(
                source, path, precision, rounded, tokens, tokenizers[role], role, short, progress
            )
            generation = generation or defaults
        _write_text(folder, tokenizers["target"])
        assert generation is not None
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            contract_version=CONTRACT_VERSION,
            outrider_version=outrider.__version__,
            vocab_tokens=count,
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


def _export_model(
    source: Source,
    path: Path,
    precision: str,
    rounding: Rounding | None,
    tokens: int,
    tokenizer: TokenizerFiles,
    role: str,
    short: torch.Tensor | None,
    progress: Progress,
) -> tuple[Model, Generation]:
    """Load, trace, save and check one model, with a head of the tokens `short` alone where they are given. Everything it held
    is free again when it returns."""
    progress.stage(f"loading the {role}")
    model = load_model(source, precision)
    head = model.get_output_embeddings()
    if head is None:
        raise UnsupportedModelError(f"{source.name} ({type(model).__name__}) has no head that gives logits")
    rows = head.weight.shape[0]
    if tokens > rows:
        raise UnsupportedModelError(f"{source.name} has {tokens:,} tokens but only {rows:,} rows of logits")
    defaults = generation_defaults(model, tokenizer)
    architecture = type(model).__name__
    parameters = sum(parameter.numel() for parameter in model.parameters())
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    known = torch.ones(rows, dtype=torch.bool)
    if short is not None:
        shorten(model, short)
        known = torch.isin(torch.arange(rows), short)
    quantization = None
    pieces: list[torch.Tensor] = []
    reference_perplexity = 0.0
    if rounding is not None:
        pieces = heldout_tokens(tokenizer, positions)
        progress.stage(f"reading held-out text with the {role}")
        reference_perplexity = perplexity(_eager(model, pieces), pieces, known)
        progress.stage(f"quantizing the {role}")
        quantization = quantize_model(model, rounding, tokenizer, positions)
    sample = sample_tokens(tokens)
    progress.stage(f"running the {role}")
    want, layers = reference(model, sample)
    progress.stage(f"tracing the {role}")
    path.parent.mkdir()
    program = trace(model, layers, spare_row=rounding is not None)
    if rounding is not None:
        pack(program, model)
    program.save(path, external_data=True)
    del model, program
    gc.collect()
    progress.stage(f"checking the {role}'s graph against the checkpoint")
    exported = Exported(path, layers, precision)
    got = exported.logits(sample)
    parity = compare(want[:, known.numpy()], got[:, known.numpy()], precision)
    assert np.isneginf(got[:, ~known.numpy()]).all()  # no arithmetic gives these
    if rounding is not None:
        progress.stage(f"reading held-out text with the {role}'s graph")
        del exported
        served = Exported(path, layers, precision, as_served=True)
        found = perplexity((served.logits(piece, [piece.shape[1]]) for piece in pieces), pieces, known)
        del served
        parity = check_perplexity(parity, found, reference_perplexity, rounding)
    entry = Model(
        source=source.name,
        architecture=architecture,
        parameters=parameters,
        precision=precision,
        vocab_rows=rows,
        max_positions=positions,
        layers=layers,
        parity=parity,
        quantization=quantization,
        head_tokens=None if short is None else len(short),
    )
    return entry, defaults


def _eager(model: PreTrainedModel, pieces: list[torch.Tensor]) -> Iterator[Floats]:
    return (reference(model, piece)[0] for piece in pieces)


def _write_text(folder: Path, tokenizer: TokenizerFiles) -> None:
    (folder / TOKENIZER).write_text(tokenizer.json, encoding="utf-8")
    if tokenizer.chat_template is not None:
        (folder / CHAT_TEMPLATE).write_text(tokenizer.chat_template, encoding="utf-8")


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """What torch and transformers say of their own workings while tracing helps no user of ours."""
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
