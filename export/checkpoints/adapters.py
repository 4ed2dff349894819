"""LoRA adapters as PEFT saves them: which are read, and which are refused.

Nothing here imports torch, so that an adapter that cannot be merged is refused at once.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from outrider.errors import SourceError, UnsupportedModelError, UsageError, reason_of
from outrider.export.checkpoints.source import AGAIN, Source

CONFIG, TENSORS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."  # of every name in a file
FACTOR = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?(2)|\.weight)")
WHOLE = re.compile(r"(.+?)(?:\.base_layer)?\.(weight|bias)")
DTYPES = ("F32", "F16", "BF16")
# Settings that do not change what is merged, are checked below, or only say what the tensors' names and shapes say, too.
OF_TRAINING = ("corda_config", "eva_config", "inference_mode", "init_lora_weights", "loftq_config", "lora_dropout", "task_type")
OF_MODULES = ("bias", "exclude_modules", "layers_pattern", "layers_to_transform", "modules_to_save", "target_modules")
OF_SCALES = ("alpha_pattern", "fan_in_fan_out", "lora_alpha", "r", "rank_pattern", "use_rslora")
OF_VERSIONS = ("auto_mapping", "base_model_name_or_path", "peft_type", "peft_version", "revision", "runtime_config")
INERT = ("megatron_core", "qalora_group_size")  # without settings that are refused
KNOWN = {*OF_TRAINING, *OF_MODULES, *OF_SCALES, *OF_VERSIONS, *INERT}
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")  # others change the base model before training
UNMERGED = "merge it with PEFT's merge_and_unload, and export what that saves"


class Factors(NamedTuple):
    """The matrices of one module, whose product is added to its weights."""

    names: dict[str, str]  # A and B to their names in the file
    shapes: dict[str, tuple[int, ...]]  # [rank, inputs] and [outputs, rank]
    is_table: bool  # whether the module is an embedding, whose inputs are tokens
    scale: float

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the product."""
        return self.shapes["B"][0], self.shapes["A"][1]


class Contents(NamedTuple):
    """What an adapter changes."""

    factors: dict[str, Factors]  # by the module's name in transformers
    whole: dict[str, tuple[str, tuple[int, ...]]]  # parameters that it replaces: their name in the file, and their shape


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter, and the factor of what it adds."""

    source: Source
    weight: float
    settings: Mapping[str, Any] = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> Adapter:
        """Read the configuration of FOLDER or FOLDER=WEIGHT, where FOLDER may be a hub id, and check a folder's tensors.

        Raises:
            UsageError: the weight is not a finite number.
            SourceError: there is no such adapter, or it cannot be read.
            UnsupportedModelError: it is of a kind that is not merged.
        """
        folder, equals, number = text.rpartition("=")
        if not equals or os.path.isdir(text):
            folder, number = text, "1"
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not folder or not math.isfinite(weight):
            raise UsageError(
                f"{text!r:.200} is not FOLDER or FOLDER=WEIGHT", "--lora takes a finite number after =, as in FOLDER=0.5"
            )
        source = Source(Path(folder).resolve().name, folder, {}) if os.path.isdir(folder) else Source.parse(folder)
        settings = None if source.options else source.object(CONFIG)
        if settings is None:
            raise SourceError(f"{source.name} has no {CONFIG}", "pass a folder in which PEFT saved an adapter")
        adapter = cls(source, weight, settings)
        adapter._check()
        if source.snapshot is None:  # otherwise they may have to be downloaded
            adapter.contents()
        return adapter

    @property
    def misfit(self) -> str:
        """A hint for an adapter that does not fit the target."""
        base = self.settings.get("base_model_name_or_path")
        return f"export the model that it was trained on{f', {base:.200}' if isinstance(base, str) and base else ''}"

    def file(self) -> Path:
        """Return the path of the tensors.

        Raises:
            SourceError: there is no such file.
        """
        if (path := self.source.file(TENSORS)) is None:
            other = self.source.file(PICKLED) is not None
            hint = "save it again with PEFT's save_pretrained, which writes safetensors" if other else AGAIN
            raise SourceError(f"{self.source.name} has no {TENSORS}", hint)
        return path

    def contents(self) -> Contents:
        """Return what the adapter changes, without reading numbers.

        Raises:
            SourceError: the file cannot be read, or a tensor is missing or does not fit the others or the configuration.
            UnsupportedModelError: there is a tensor of an unknown kind.
        """
        name, shapes = self.source.name, self._shapes()
        names: dict[str, dict[str, str]] = defaultdict(dict)
        tables: dict[str, bool] = {}
        whole = {}
        for key, shape in shapes.items():
            own = key.removeprefix(PREFIX)
            if own != key and (found := FACTOR.fullmatch(own)) is not None:
                module, of_table, matrix = found.groups()
                names[module][matrix] = key
                tables[module] = of_table is not None
            elif own != key and "lora_" not in own and (found := WHOLE.fullmatch(own)) is not None:
                whole[".".join(found.groups())] = key, shape
            else:
                raise UnsupportedModelError(f"{name} has a tensor of an unknown kind, {key:.200}", UNMERGED)
        if len(shapes) != len(whole) + sum(map(len, names.values())):
            raise SourceError(f"{name} has two tensors for the same weights", AGAIN)
        factors = {}
        for module, matrices in names.items():
            if len(matrices) < 2:
                raise SourceError(f"{name} has only one of the two matrices of {module}", AGAIN)
            rank, scale = self._scale(module)
            sizes = {matrix: shapes[key] for matrix, key in matrices.items()}
            if any(len(size) != 2 for size in sizes.values()) or (sizes["A"][0], sizes["B"][1]) != (rank, rank):
                found_sizes = " and ".join(str(list(sizes[matrix])) for matrix in "AB")
                raise SourceError(f"{name} has matrices {found_sizes} for {module}, whose rank is {rank} in {CONFIG}", AGAIN)
            factors[module] = Factors(matrices, sizes, tables[module], scale)
        if not factors and not whole:
            raise SourceError(f"{name} has no tensors", AGAIN)
        for module in self.settings.get("modules_to_save") or ():
            if not any(f".{module}." in f".{parameter}" for parameter in whole):
                raise SourceError(f"{name} lacks the weights of {module!r:.100}, one of its modules_to_save", AGAIN)
        if whole and self.weight != 1:
            raise UsageError(f"{name} replaces {next(iter(whole))}, so that it has no weight", f"use --lora {name} without one")
        return Contents(factors, whole)

    def _check(self) -> None:
        """Refuse kinds of adapters that are not merged."""
        name, settings = self.source.name, self.settings
        if (kind := settings.get("peft_type")) != "LORA":
            raise UnsupportedModelError(f"{name} is a {kind!r:.50} adapter; only LORA is merged", UNMERGED)
        unknown = [key for key, value in settings.items() if value and key not in KNOWN]
        if unknown:
            raise UnsupportedModelError(f"{name} uses {unknown[0]:.100}, which is not merged", UNMERGED)
        if (start := settings.get("init_lora_weights")) not in PLAIN_STARTS:
            hint = "save it as plain LoRA: path_initial_model_for_weight_conversion of PEFT's save_pretrained"
            raise UnsupportedModelError(f"{name} was trained on changed weights (init_lora_weights = {start!r:.50})", hint)
        modules = settings.get("modules_to_save") or []
        if not isinstance(modules, list) or not all(isinstance(each, str) for each in modules):
            raise SourceError(f"{name} has modules_to_save = {modules!r:.50}", AGAIN)

    def _scale(self, module: str) -> tuple[int, float]:
        """Return the rank r of a module, and its product's factor: alpha / r, or alpha / sqrt(r) with `use_rslora`."""
        rank, alpha = self._setting("rank_pattern", "r", module), self._setting("alpha_pattern", "lora_alpha", module)
        if rank != int(rank) or rank < 1:
            raise SourceError(f"{self.source.name} has the rank {rank} for {module}", AGAIN)
        return int(rank), self.weight * alpha / (math.sqrt(rank) if self.settings.get("use_rslora") else rank)

    def _setting(self, pattern: str, default: str, module: str) -> float:
        """Return the value of the first pattern that a module's name ends with, otherwise the default."""
        patterns = self.settings.get(pattern) or {}
        try:
            key = next((key for key in patterns if re.fullmatch(rf"(.*\.)?({key})", module)), None)
            value: Any = self.settings.get(default) if key is None else patterns[key]
            number = float(value)
            if isinstance(value, bool) or not math.isfinite(number):
                raise ValueError(f"{value!r:.50} is not a number")
        except (re.error, TypeError, ValueError, KeyError, OverflowError) as error:
            reason = reason_of(error)[:100]
            raise SourceError(f"{self.source.name} has no usable {default} for {module}: {reason}", AGAIN) from error
        return number

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors in the file."""
        from safetensors import SafetensorError, safe_open

        path, name = self.file(), self.source.name
        try:
            with safe_open(path, framework="numpy") as file:
                outlines = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
                dtypes = {key: outline.get_dtype() for key, outline in outlines.items()}
                shapes = {key: tuple(outline.get_shape()) for key, outline in outlines.items()}
        except (OSError, ValueError, SafetensorError) as error:
            raise SourceError(f"cannot read the {TENSORS} of {name}: {reason_of(error)[:300]}", AGAIN) from error
        if odd := [key for key, dtype in dtypes.items() if dtype not in DTYPES]:
            raise UnsupportedModelError(f"{odd[0]:.200} of {name} is in {dtypes[odd[0]]}, which is not read", UNMERGED)
        return shapes
