"""Export one model of a pair: load, quantize and trace it, and check the graph against the checkpoint."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
import torch
from transformers import PreTrainedModel

from outrider.bundle.manifest import WEIGHTS, Generation, MergedAdapter, Model, Parity, Quantization, model_file
from outrider.engines.contract import CONTEXT
from outrider.errors import SourceError, UnsupportedModelError, UsageError
from outrider.export.checkpoints.adapters import Adapter
from outrider.export.checkpoints.checkpoint import generation_defaults, max_positions, open_model
from outrider.export.checkpoints.source import CORRECT_CONFIG, Source
from outrider.export.checkpoints.streamed import Streamed
from outrider.export.checkpoints.text_part import has_text_part
from outrider.export.checkpoints.tokenizer import TokenizerFiles
from outrider.export.graph.cache_layers import CacheLayout
from outrider.export.graph.features import feature_mixer
from outrider.export.graph.step_model import trace
from outrider.export.heads.block_head import BlockHead
from outrider.export.heads.draft_head import DraftHead
from outrider.export.heads.short_head import ShortHead, propose
from outrider.export.heldout import check_perplexity, heldout_tokens, perplexity
from outrider.export.parity import CHUNKS, Exported, Reference, compare, reference, sample_features, sample_tokens, texts_logits
from outrider.export.weights.quantize import pack, quantize_model
from outrider.export.weights.rounding import AS_IS, Rounding
from outrider.progress import Progress

BLOCK = 6  # rows of the block to compare, fewer than the last of `parity.CHUNKS`
OF_HEADS = ("mask_token", "block_state", "from_anchor", "trained_k")  # attributes of a `DraftHead` for the manifest


@dataclass(frozen=True, slots=True)
class ModelJob:
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
    adapters: Sequence[Adapter] = ()


class Expected(NamedTuple):
    """What a model computes before it is traced."""

    known: torch.Tensor  # bool [V], the tokens that it can propose
    pieces: list[torch.Tensor]  # held-out texts, int64 [1, S]; empty if their perplexity is not compared
    perplexity: float  # of these, before the weights are rounded
    quantization: Quantization | None
    sample: torch.Tensor  # int64 [1, S], the input of a pass with rounded weights
    features: torch.Tensor | None  # float32 [1, S, H], also its input, of a draft head
    results: Reference


def load(job: ModelJob) -> tuple[PreTrainedModel, Streamed, Generation]:
    """Load a model without its large weights, and check the numbers in its configuration."""
    job.progress.stage(f"loading the {job.role}")
    model, weights = open_model(job.source, job.precision, job.folder, job.progress, job.adapters)
    if has_text_part(model.config):
        job.progress.stage(f"loading the {job.role}: text only, images are refused")
    if weights.without_scales:
        job.progress.stage(
            f"loading the {job.role}: its scales of activations and caches are left out; nothing is rounded by them"
        )
    defaults, positions = generation_defaults(model, job.tokenizer), max_positions(model)
    name, rows = job.source.name, head_rows(model, job)
    if positions is not None and positions < 3:  # a round with one draft token needs three
        raise SourceError(f"{name} has {positions} positions (max_position_embeddings), but needs at least 3", CORRECT_CONFIG)
    for token in defaults.eos_token_ids:
        if not 0 <= token < rows:
            raise SourceError(
                f"{name} ends texts with token {token} (eos_token_id), but has only {rows:,} logits", CORRECT_CONFIG
            )
    return model, weights, defaults


def head_rows(model: PreTrainedModel, job: ModelJob) -> int:
    """Return the number of logits per token."""
    name, head = job.source.name, model.get_output_embeddings()
    if head is None:
        raise UnsupportedModelError(f"{name} ({type(model).__name__}) has no output head")
    rows = int(head.weight.shape[0])
    if job.tokens > rows:
        raise UnsupportedModelError(
            f"{name} has {job.tokens:,} tokens but only {rows:,} rows of logits",
            f"remove the tokens from {rows} on from its tokenizer, or add rows: resize_token_embeddings of transformers",
        )
    return rows


def export_model(job: ModelJob, model: PreTrainedModel, weights: Streamed, rows: int) -> Model:
    """Trace, save and check one model; its graph gets `rows` logits per token.

    No step needs all weights: passes, rounding and the file that is written take one layer after the other.
    """
    rounding, mixer, is_head = _rounding(job, weights), feature_mixer(model), isinstance(model, DraftHead)
    width = model.config.hidden_size if is_head else None if mixer is None else mixer.hidden_size
    architecture = type(model).__name__
    block = {name: getattr(model, name) for name in OF_HEADS} if is_head else {}
    # A head's embedding is usually the target's, and a step reads one row of it.
    lent = {id(parameter) for parameter in model.get_input_embeddings().parameters()} if is_head else set()
    parameters = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in lent)
    # A head's limit is often the length of its training texts. Its rotary embedding works beyond it, with lower acceptance.
    positions, known = None if is_head else max_positions(model), _known(model, weights, job, rows)
    expected = _run(job, rounding, model, weights, positions, known)
    layout = expected.results.layout
    if layout.recurrent and job.role != "target":
        raise UnsupportedModelError(
            f"{job.source.name} ({architecture}) keeps a recurrent state, which only targets may", "choose another draft"
        )
    _write(job, model, weights, layout, rows, width)
    del model, weights
    gc.collect()
    return Model(
        source=job.source.name,
        adapters=[MergedAdapter(source=each.source.name, weight=each.weight) for each in job.adapters],
        architecture=architecture,
        parameters=parameters,
        precision=job.precision,
        vocab_rows=rows,
        max_positions=positions,
        layers=layout.layers,
        recurrent=[*layout.recurrent],
        parity=_check(job, rounding, expected, width),
        quantization=expected.quantization,
        head_tokens=None if known.all() else int(known.sum()),
        features=width,
        **block,
    )


def _run(
    job: ModelJob,
    rounding: Rounding | None,
    model: PreTrainedModel,
    weights: Streamed,
    positions: int | None,
    known: torch.Tensor,
) -> Expected:
    """Quantize a model, and run it before and after that, for the comparison with its graph."""
    role, progress, is_head = job.role, job.progress, isinstance(model, DraftHead)
    quantization, pieces, of_checkpoint = None, list[torch.Tensor](), 0.0
    if rounding is not None:
        if not is_head:
            pieces = heldout_tokens(job.tokenizer, positions)
            progress.stage(f"reading held-out text with the {role}", len(weights.parts) or None)
            of_checkpoint = perplexity(texts_logits(model, pieces), pieces, known)
        progress.stage(f"quantizing the {role}", len(weights.parts) or None)
        quantization = quantize_model(model, weights, rounding, job.tokenizer, positions)
    sample = sample_tokens(job.tokens)
    if isinstance(model, BlockHead):
        sample[:, :-BLOCK] = CONTEXT  # the rest is the block, within the last chunk
    progress.stage(f"running the {role}")
    features = sample_features(model.config.hidden_size) if is_head else None
    return Expected(known, pieces, of_checkpoint, quantization, sample, features, reference(model, sample, features))


def _write(job: ModelJob, model: PreTrainedModel, weights: Streamed, layout: CacheLayout, rows: int, width: int | None) -> None:
    """Trace a model, write its graph and its weights, and close them."""
    path, progress, quantized = job.folder / model_file(job.role), job.progress, job.rounding is not None
    progress.stage(f"tracing the {job.role}")
    path.parent.mkdir(exist_ok=True)
    with weights.tracing():
        program = trace(model, layout, rows, quantized, width, isinstance(model, DraftHead))
        weights.attach(program.model.graph)
    if quantized:
        pack(program, model, weights)
    tensors = [value.const_value for value in program.model.graph.initializers.values()]
    progress.stage(f"writing the {job.role}", sum(each.nbytes for each in tensors if each is not None))
    ir.save(program.model, path, external_data=path.name + WEIGHTS, callback=lambda tensor, _: progress.advance(tensor.nbytes))
    weights.close()


def _check(job: ModelJob, rounding: Rounding | None, expected: Expected, width: int | None) -> Parity:
    """Compare a graph with the model that it was traced from, and its perplexity with the checkpoint's.

    Raises:
        ParityError: the graph computes something else, or rounding the weights ruins the model.
    """
    path, layout, known, progress = job.folder / model_file(job.role), expected.results.layout, expected.known, job.progress
    progress.stage(f"checking the {job.role}'s graph against the checkpoint", len(CHUNKS))
    exported = Exported(path, layout, job.precision, features=width)
    actual, written = exported.results(expected.sample, features=expected.features, progress=progress)
    assert np.isneginf(actual[:, ~known.numpy()]).all()  # these are constant, not computed
    compared = (expected.sample[0] != CONTEXT).numpy()
    want, got = (each[compared][:, known.numpy()] for each in (expected.results.logits, actual))
    parity = compare(want, got, job.precision)
    if expected.results.features is not None and written is not None:
        compare(expected.results.features, written, job.precision, "features")
    if not (pieces := expected.pieces) or rounding is None:
        return parity
    progress.stage(f"reading held-out text with the {job.role}'s graph", len(pieces) * (2 if rounding.method == AS_IS else 1))
    unrounded = perplexity(exported.texts_logits(pieces, progress), pieces, known) if rounding.method == AS_IS else None
    del exported
    served = Exported(path, layout, job.precision, as_served=True, features=width)
    as_served = perplexity(served.texts_logits(pieces, progress), pieces, known)
    return check_perplexity(parity, as_served, expected.perplexity, rounding, unrounded)


def _rounding(job: ModelJob, weights: Streamed) -> Rounding | None:
    """Return how the weights are rounded: as-is is for quantized checkpoints, and a draft may be another one.

    Raises:
        UsageError: the target is not quantized.
    """
    if job.rounding is None or job.rounding.method != AS_IS or weights.has_integers:
        return job.rounding
    if job.role == "target":
        raise UsageError(f"{job.source.name} stores no integers that {AS_IS} could keep", "use --precision int4 or int8")
    return replace(job.rounding, method="rtn")


def _known(model: PreTrainedModel, weights: Streamed, job: ModelJob, rows: int) -> torch.Tensor:
    """Limit a draft to tokens of the target's vocabulary, and return which tokens it can propose, bool [V]."""
    head = model.get_output_embeddings()
    if isinstance(head, ShortHead):  # a draft head comes with its tokens
        return head.place < head.rows.out_features
    own_rows = int(head.weight.shape[0])
    if job.short is None and own_rows == rows:
        return torch.ones(rows, dtype=torch.bool)
    tokens = torch.arange(min(rows, own_rows)) if job.short is None else job.short
    with weights.of(head):
        propose(model, tokens, rows)
    return torch.isin(torch.arange(rows), tokens)
