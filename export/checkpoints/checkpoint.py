"""Load the model of a checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import InvalidVersion, Version
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import outrider.export.checkpoints.mimo  # noqa: F401  # registers its classes with transformers
from outrider.bundle.manifest import Generation
from outrider.engines.precisions import PRECISIONS
from outrider.errors import SourceError, UnsupportedModelError
from outrider.export.checkpoints.adapters import Adapter
from outrider.export.checkpoints.gguf_file import gguf_file_of
from outrider.export.checkpoints.gguf_reader import metadata_read_once
from outrider.export.checkpoints.merging import merge
from outrider.export.checkpoints.outlines import Outlined
from outrider.export.checkpoints.packed import packing_of
from outrider.export.checkpoints.source import AGAIN, CORRECT_CONFIG, Source
from outrider.export.checkpoints.streamed import Streamed
from outrider.export.checkpoints.text_part import has_text_part, keep_text_part
from outrider.export.checkpoints.tokenizer import TokenizerFiles
from outrider.progress import SILENT, Progress

EARLIER_SETTINGS = frozenset(
    ("_name_or_path", "auto_map", "model_type", "quantization_config", "rope_scaling", "rope_theta", "torch_dtype")
)
MOST_POSITIONS = 2**40
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def read_config(source: Source) -> Any:
    """Read the model's configuration.

    Raises:
        UnsupportedModelError: the model is an encoder-decoder or not a language model, it is quantized by a method that is not
            read, or a later transformers wrote settings that this one does not know. Other unsupported models fail when they
            run or are traced.
    """
    source.config()  # checks the numbers
    packing_of(source.quantization(), source.name)  # refuses formats that are not read
    file = gguf_file_of(source)
    with metadata_read_once():
        config = source.read("configuration", AutoConfig)
    if file is not None:
        file.amend(config)
    _check_text(source, config)
    kind = config.model_type
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{source.name} ({kind}) is an encoder-decoder; only decoders are supported")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not has_text_part(config):
        raise UnsupportedModelError(f"{source.name} ({kind}) is not a causal language model in transformers")
    _check_settings(source, config)
    return config


def _check_text(source: Source, config: Any) -> None:
    """Refuse a nested value that is no configuration, and numbers that transformers does not check."""
    try:
        text = config.get_text_config()
    except ValueError as error:  # there are several text configurations
        raise SourceError(f"{source.name}: {error}", CORRECT_CONFIG) from error
    if not isinstance(text, PreTrainedConfig):
        raise SourceError(f"the text_config of {source.name} is {text!r:.50}, not a configuration", CORRECT_CONFIG)
    for entry in _rope_entries(text):
        for key in ("original_max_position_embeddings", "factor"):
            value = entry.get(key)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and 0 < value < MOST_POSITIONS):
                raise SourceError(f"the rotary embedding of {source.name} has {key} = {value!r:.50}", CORRECT_CONFIG)


def _rope_entries(text: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the parameters of the rotary embeddings: one for each kind of layer, or one for all."""
    rope = getattr(text, "rope_parameters", None) or {}
    return [entry for entry in rope.values() if isinstance(entry, dict)] or [rope]


def _check_settings(source: Source, config: Any) -> None:
    """Refuse settings of a later transformers, which this one would ignore.

    Other unknown settings, such as those of trainers and of other servers, mean nothing to any version.
    """
    given = source.config()
    try:
        later = Version(str(given.get("transformers_version"))) > Version(transformers.__version__)
    except InvalidVersion:
        return
    text = config.get_text_config()
    parts = [(given, config)] if text is config else [(given, config), (given.get("text_config") or {}, text)]
    unknown = {name for part, own in parts for name, value in part.items() if value and name not in _settings(type(own))}
    if later and unknown:
        raise UnsupportedModelError(
            f"{source.name} is from transformers {given['transformers_version']}, and {transformers.__version__} does not know"
            f" its {', '.join(sorted(unknown))}",
            "upgrade transformers",
        )


def _settings(kind: type[Any]) -> set[str]:
    """Return the names that a configuration of this class may have, including those of earlier versions."""
    names = {field.name for field in dataclasses.fields(kind)}
    with contextlib.suppress(Exception):  # a class may refuse its own defaults
        names |= set(kind().to_dict())
    return names | set(kind.attribute_map) | set(kind.sub_configs) | EARLIER_SETTINGS


def learned_positions(model: PreTrainedModel) -> range | None:
    """Return the rows of a model's table of positions that a text can use, in order; None for models without such a table."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding) and each is not model.get_input_embeddings()]
    known = [each for each in tables if limit and limit <= each.num_embeddings <= limit + 2]  # OPT's has two more
    if limit is None or not known:
        return None
    padding = known[0].padding_idx  # RoBERTa's positions begin after the padding row
    return range(0 if padding is None else padding + 1, limit)


def max_positions(model: PreTrainedModel) -> int | None:
    """Return the length of the longest text for which the model's graph is right; None if there is no limit.

    If a rotary embedding depends on the length of the text ("dynamic", "longrope"), the limit is the length up to which it does
    not. If a rotary embedding is stretched, the limit is at least the original length times the factor, because recipes for
    stretching do not change `max_position_embeddings`.
    """
    text, places = model.config.get_text_config(), learned_positions(model)  # the same object, except in multimodal models
    limit: int | None = getattr(text, "max_position_embeddings", None) if places is None else len(places)
    entries = _rope_entries(text)
    if limit is not None and places is None:
        limit = max(limit, min(_stretched(entry, limit) for entry in entries))
    original = [entry.get("original_max_position_embeddings") for entry in entries if _scales_by_length(entry.get("rope_type"))]
    return min([each for each in (limit, *original) if each is not None], default=None)


def _stretched(rope: dict[str, Any], limit: int) -> int:
    """Return the original length of a stretched rotary embedding times its factor, or else `limit`."""
    if rope.get("rope_type") not in ("yarn", "linear"):
        return limit
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    return limit if original is None or factor is None else int(original * factor)


def _scales_by_length(rope_type: object) -> bool:
    return rope_type in LENGTH_DEPENDENT_ROPE


def _fix_rotary_embeddings(model: PreTrainedModel) -> None:
    """Fix the rotary embeddings for texts of up to `max_positions` tokens, so that no pass asks for the length."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict):
            module.rope_type = {name: "default" if _scales_by_length(each) else each for name, each in kind.items()}
        elif _scales_by_length(kind):
            module.rope_type = "default"


def set_experts(model: PreTrainedModel) -> None:
    """Make a mixture gather the weights of the chosen experts: ONNX cannot express the default, grouped_mm."""
    possible = getattr(model, "_can_set_experts_implementation", None)
    if possible is not None and possible():
        model.set_experts_implementation("batched_mm")


def load_model(source: Source, precision: str, adapters: Sequence[Adapter] = ()) -> PreTrainedModel:
    """Load the model on the CPU as in `open_model`, whose errors it raises, with all weights."""
    model, weights = open_model(source, precision, adapters=adapters)
    weights.keep_all()
    return model


def open_model(
    source: Source,
    precision: str,
    scratch: Path | None = None,
    progress: Progress = SILENT,
    adapters: Sequence[Adapter] = (),
) -> tuple[PreTrainedModel, Streamed]:
    """Load the model on the CPU, in fp32 if its weights will be quantized, otherwise in `precision`, and its large weights.

    Args:
        source: the checkpoint.
        precision: one of `PRECISIONS`.
        scratch, progress: see `Streamed`.
        adapters: are merged.

    Raises:
        SourceError: the model cannot be read, weights are missing or have the wrong shape, or an adapter does not fit.
        UsageError: two adapters replace the same weights.
    """
    file, config = gguf_file_of(source), read_config(source)
    packing = packing_of(source.quantization(), source.name)
    for each in (config, config.get_text_config()) if packing is not None else ():
        vars(each).pop("quantization_config", None)  # transformers would want the library that wrote it
    checkpoint, weights = Outlined(packing), Streamed(scratch, progress)
    with checkpoint.loading():
        model, report = source.read(
            "weights",
            AutoModelForImageTextToText if has_text_part(config) else AutoModelForCausalLM if file is None else file,
            config=config,
            dtype=getattr(torch, PRECISIONS[precision].dtype),  # weights are quantized after loading
            attn_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
        )
    missing = sorted(report["missing_keys"]) + sorted(str(key[0]) for key in report["mismatched_keys"])
    if missing:
        raise SourceError(
            f"{len(missing)} weights of {source.name} are missing or have the wrong shape; the first is {missing[0]}",
            AGAIN,
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    if has_text_part(config):
        keep_text_part(model)
    set_experts(model)
    if file is not None:
        file.finish(model)
        # Its weights are plain tensors now, and training may write them.
        model.hf_quantizer, model.is_quantized = None, False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
    _fix_rotary_embeddings(model)
    model.requires_grad_(False)
    weights.follow(model, checkpoint)
    merge(adapters, modules, weights)
    return model.eval(), weights


def generation_defaults(model: PreTrainedModel, tokenizer: TokenizerFiles) -> Generation:
    """Return the end-of-text ids from the generation configuration, the model's configuration, or the tokenizer."""
    configs = (model.generation_config, model.config, model.config.get_text_config())
    declared = [getattr(config, "eos_token_id", None) for config in configs]
    eos = next((eos for eos in (*declared, tokenizer.eos_token_id) if eos is not None), None)
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if wrong := [each for each in ids if not isinstance(each, int) or isinstance(each, bool)]:
        raise SourceError(
            f"texts of {model.name_or_path} end with {wrong[0]!r:.50} (eos_token_id), which is not a token id", CORRECT_CONFIG
        )
    return Generation(eos_token_ids=ids, special_tokens=tokenizer.special_tokens)
