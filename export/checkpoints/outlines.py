"""Load a model without its large weights, which can be read later, a part at a time.

transformers makes the model and checks the checkpoint against it: its own loader runs over tensors without data. Later the
same loader reads one part at a time, so that every conversion of names and shapes is transformers' own.
"""

from __future__ import annotations

import copy
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    dot_natural_key,
    rename_source_key,
)

from outrider.errors import SourceError, UnsupportedModelError
from outrider.export.checkpoints.integers import Content
from outrider.export.checkpoints.packed import UNUSED, unpacked
from outrider.export.checkpoints.packed_weight import OTHERWISE, PackedWeight
from outrider.export.checkpoints.separate_experts import joining
from outrider.export.checkpoints.source import AGAIN, reason_of
from outrider.export.checkpoints.swapped import swapped

LARGE = 2**13  # numbers; smaller tensors and vectors are always in memory, because a trace may compute with their values
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BYTES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I8": torch.int8}
OF_LAYER = re.compile(r".*?\.\d+(?=\.)")


class FileTensor:
    """A tensor in a safetensors file. It is read, and not mapped, so that its pages do not stay in memory."""

    def __init__(self, file: Any, name: str):
        self._file, self._name = file, name
        outline = file.get_slice(name)
        self.stored = outline.get_dtype()
        self.empty = torch.empty(outline.get_shape(), dtype=(FLOATS | BYTES).get(self.stored, torch.uint8), device="meta")

    def __getitem__(self, _: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(self._name)
        return tensor


def opened(path: str | Path) -> Any:
    """Open one of a checkpoint's safetensors files.

    Raises:
        SourceError: it is missing or damaged.
    """
    try:
        return safe_open(path, framework="pt", backend="pread")
    except (OSError, SafetensorError) as error:
        reason = reason_of(error) if Path(path).exists() else "it is missing"
        raise SourceError(f"cannot read the weights in {path}: {reason}", AGAIN) from error


class _Outline:
    """The shape and dtype of a checkpoint's tensor, for transformers' loader."""

    def __init__(self, tensor: Any):
        self._tensor = tensor

    def __getitem__(self, _: Any) -> torch.Tensor:
        if isinstance(self._tensor, torch.Tensor):
            return self._tensor.to("meta")
        if (empty := getattr(self._tensor, "empty", None)) is not None:
            return empty  # type: ignore[no-any-return]
        size = self._tensor.data.nbytes // max(1, math.prod(self._tensor.shape))  # transformers' `LazyGgufTensor`
        dtypes = {1: torch.uint8, 2: torch.float16, 4: torch.float32}
        return torch.empty(self._tensor.shape, dtype=dtypes[size], device="meta")


class Outlined:
    """The tensors of a checkpoint whose model was loaded without large weights."""

    def __init__(self, packing: Mapping[str, Any] | None = None) -> None:
        """Make one for a checkpoint that is read as a whole, unless a model is loaded within `loading`.

        Args:
            packing: the settings of `unpacked`, if the checkpoint's weights are quantized by one of its methods.
        """
        self._packing = packing
        # The names of large tensors, by the part of the model and the first of the parameters that transformers makes of them.
        self.sources: dict[str, dict[str, list[str]]] = defaultdict(dict)
        self.without_scales = False  # whether the checkpoint has scales of activations or caches, which are not read
        self._tensors: Mapping[str, Any] = {}
        self._config: Any = None

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Make transformers load a model without large weights."""
        theirs = PreTrainedModel._load_pretrained_model

        def outline(model: Any, state_dict: Any, files: Any, config: Any, *rest: Any, **options: Any) -> tuple[Any, Any]:
            quantizer = config.hf_quantizer  # converts what it reads in its own way, except for GGUF files
            if state_dict is None and (quantizer is not None or not _are_safetensors(files)):
                return theirs(model, state_dict, files, config, *rest, **options)  # type: ignore[no-any-return]
            tensors = state_dict
            if tensors is None:
                files = [*map(opened, files)]
                tensors = {name: FileTensor(file, name) for file in files for name in file.keys()}  # noqa: SIM118
            if self._packing is not None:
                self.without_scales = any(map(UNUSED.fullmatch, tensors))
                tensors = unpacked(tensors, self._packing)
            return self._outline(model, tensors, config), None

        with swapped(PreTrainedModel, "_load_pretrained_model", staticmethod(outline)):
            yield

    def _outline(self, model: PreTrainedModel, tensors: Mapping[str, Any], config: Any) -> Any:
        """Load a model without large weights, and return transformers' report."""
        parameters, known = dict(model.named_parameters(remove_duplicate=False)), model.state_dict()
        own = config.weight_mapping or []
        joined = joining(model, tensors, (each for each in own if isinstance(each, WeightConverter)))
        config = replace(config, weight_mapping=[*own, *joined])
        mapping = copy.deepcopy(config.weight_mapping)  # it remembers what it has renamed
        renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        converters = [each for each in mapping if isinstance(each, WeightConverter)]
        targets: dict[str, list[str]] = defaultdict(list)  # what transformers makes of a tensor, or the first of several
        for name in sorted(tensors, key=dot_natural_key):
            target, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
            if target not in known and name in known:
                target, _ = rename_source_key(name, [], [], model.base_model_prefix, known)
            if _has_no_place(name, target, tensors, known):
                continue
            targets[target].append(name)
            stored = getattr(tensors[name], "stored", None)
            if target in parameters and parameters[target].is_floating_point() and stored not in (None, *FLOATS):
                settings = self._packing or model.config.to_dict().get("quantization_config") or {}
                method = settings.get("quant_method", "none")
                raise UnsupportedModelError(f"{name} is quantized ({stored}) by a method that is not read: {method}", OTHERWISE)
        tensors = {name: tensors[name] for names in targets.values() for name in names}
        for tied, other in model.all_tied_weights_keys.items():
            both = targets.get(tied, []) + targets.get(other, [])
            if len(both) == 2 and torch.equal(*(tensors[name][...] for name in both)):  # transformers only ties equal ones
                tensors = {name: tensor for name, tensor in tensors.items() if name not in targets[tied]}
                del targets[tied]
        outlines = {name: _Outline(tensor) for name, tensor in tensors.items()}
        report = _load(model, outlines, replace(config, device_map={"": "meta"}))
        self._tensors, self._config = tensors, replace(config, device_map=None)
        large = {
            target
            for target in targets.keys() & parameters.keys()
            if _is_large(parameters[target]) or any(map(contents_of, map(tensors.get, targets[target])))
        }
        for target in targets.keys() & large:
            self.sources[part_of(target)][target] = targets[target]
        small = [name for target in targets.keys() & known.keys() - large for name in targets[target]]
        _load(model, {name: tensors[name] for name in small}, self._config)
        return report

    @property
    def has_integers(self) -> bool:
        """Whether weights are stored as integers that can be read on their own."""
        return any(map(contents_of, self._tensors.values()))

    def read(self, model: PreTrainedModel, part: str) -> None:
        """Give a model the large weights of a part, and no others."""
        names = [name for each in self.sources.get(part, {}).values() for name in each]
        _load(model, {name: self._tensors[name] for name in names}, self._config)

    def read_content(self, model: PreTrainedModel, part: str, content: str) -> None:
        """Load one of `integers.CONTENTS` where a part's weights belong, for weights that are stored as integers."""
        wanted: dict[str, Content] = {}
        for names in self.sources.get(part, {}).values():
            contents = [contents_of(self._tensors[name]) for name in names]
            if all(contents) and any(content in each for each in contents):
                wanted |= {name: Content(self._tensors[name], content) for name in names}
        if wanted:
            _load(model, wanted, self._config)


def contents_of(tensor: Any) -> frozenset[str]:
    """Return what a checkpoint's tensor consists of, some of `integers.CONTENTS`; nothing if it is stored as numbers."""
    return getattr(tensor, "contents", frozenset())


def part_of(name: str) -> str:
    """Return the layer of a parameter, or the module outside the layers."""
    match = OF_LAYER.match(name)
    return name.rpartition(".")[0] if match is None else match[0]


def _has_no_place(name: str, target: str, tensors: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    """Return whether a tensor is the bias of a quantized module, which has none in the model. Such a bias must be 0.

    AutoGPTQ's modules always have one.
    """
    module, _, part = name.rpartition(".")
    in_model = f"{target.removesuffix(part)}weight"
    if (
        part != "bias"
        or target in known
        or in_model not in known
        or not isinstance(tensors.get(f"{module}.weight"), PackedWeight)
    ):
        return False
    if tensors[name][...].any():
        raise UnsupportedModelError(f"{name} is not 0, but the model has no such bias", OTHERWISE)
    return True


def _load(model: Any, tensors: Mapping[str, Any], config: Any) -> Any:
    """Load some tensors as transformers does, without its progress bar, and return its report."""
    with without_bars():
        report, _ = convert_and_load_state_dict_in_model(model, dict(tensors), config)
    return report


@contextmanager
def without_bars() -> Iterator[None]:
    """Hide transformers' progress bars."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()


def _are_safetensors(files: list[str] | None) -> bool:
    return files is not None and all(file.endswith(".safetensors") for file in files)


def _is_large(parameter: torch.Tensor) -> bool:
    return parameter.dim() > 1 and parameter.numel() > LARGE
