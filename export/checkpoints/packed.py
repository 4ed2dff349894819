"""Read the weights of quantized safetensors checkpoints, without the libraries that wrote them.

A method stores several tensors for each quantized module. `unpacked` puts one weight in their place, which is computed when it
is read. What is quantized and in which groups follows from the tensors, so rules for single modules need no attention.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from outrider.errors import SourceError, UnsupportedModelError
from outrider.export.checkpoints.integers import Integers
from outrider.export.checkpoints.source import AGAIN

AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)  # the places in a word of consecutive outputs
OTHERWISE = "export the checkpoint that it was made from, or a GGUF file of it"

Parts = Mapping[str, Any]
"""The tensors of a module, by the last part of their names."""


class PackedWeight:
    """The weight of one module, float32 [N, K]."""

    def __init__(self, name: str, shape: tuple[int, int], read: Callable[[], Any], contents: frozenset[str] = frozenset()):
        """Make one.

        Args:
            name: the module's.
            shape: (N, K).
            read: returns `Integers` that have these contents; without contents, the weight.
            contents: those of `integers.CONTENTS` that matter.
        """
        self.empty, self.contents = torch.empty(shape, device="meta"), contents
        self._name, self._read = name, read

    def __getitem__(self, _: Any) -> torch.Tensor:
        return self._checked(lambda: self._read().weight() if self.contents else self._read())

    def content(self, name: str) -> torch.Tensor:
        """Return one of `integers.CONTENTS`, float32 [N, K]. There must be contents.

        Raises:
            SourceError: a tensor is missing, or does not fit the others.
        """
        return self._checked(lambda: self._read().content(name))

    def _checked(self, read: Callable[[], Any]) -> torch.Tensor:
        try:
            weight: torch.Tensor = read()
        except KeyError as error:
            raise SourceError(f"{self._name} has no tensor {error}", AGAIN) from error
        except (RuntimeError, ValueError, IndexError) as error:  # sizes that do not fit each other
            raise SourceError(f"the weights of {self._name} do not fit each other: {error}", AGAIN) from error
        if weight.shape != self.empty.shape:
            raise SourceError(f"{self._name} has {tuple(weight.shape)} weights, not {tuple(self.empty.shape)}", AGAIN)
        return weight.contiguous()


def packing_of(config: Any) -> Mapping[str, Any] | None:
    """Return the `quantization_config` of a configuration if it has a method in `METHODS`, otherwise None."""
    settings = getattr(config, "quantization_config", None)
    return settings if isinstance(settings, dict) and settings.get("quant_method") in METHODS else None


def unpacked(tensors: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a checkpoint, with one weight for each quantized module.

    Args:
        tensors: those in the files, by name; `empty` has the shape, and indexing reads.
        settings: `quantization_config` of a method in `METHODS`.

    Raises:
        UnsupportedModelError: the tensors are in a layout that is not read.
        SourceError: some are missing, now or when a weight is read.
    """
    mark, own, make = METHODS[settings["quant_method"]]
    modules: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        modules[module][part] = tensor
    result = dict(tensors)
    for module, parts in modules.items():
        if mark not in parts:
            continue
        for part in own & parts.keys():
            del result[f"{module}.{part}"]
        result[f"{module}.weight"] = make(module, parts, settings)
    for name, tensor in result.items():
        if name.endswith(".weight") and tensor.empty.dtype.itemsize == 1:
            raise SourceError(f"{name} is quantized, but has no scale", AGAIN)
    return result


def _awq(module: str, parts: Parts, settings: Mapping[str, Any]) -> PackedWeight:
    """Read AWQ's layout "gemm": words of eight outputs, with zero points."""
    version = str(settings.get("version", "gemm")).lower()
    if version != "gemm" or settings.get("bits", 4) != 4:
        raise UnsupportedModelError(f"{module} is in AWQ's layout {version}; only gemm with 4 bits is read", OTHERWISE)
    inputs, words = parts["qweight"].empty.shape

    def read() -> Any:
        integers, zeros = (_unpack(parts[each][...], 4, words * 8) for each in ("qweight", "qzeros"))
        integers, zeros = (each.unflatten(1, (words, 8))[..., AWQ_NIBBLES].flatten(1).T for each in (integers, zeros))
        return Integers(integers, parts["scales"][...].float().T, _groups(inputs, zeros.shape[1]), zeros)

    return PackedWeight(module, (words * 8, inputs), read, _GROUPED | {"zeros"})


def _gptq(module: str, parts: Parts, settings: Mapping[str, Any]) -> PackedWeight:
    """Read GPTQ's layouts: words of consecutive inputs; rows may belong to groups in any order."""
    layout = settings.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2") or settings.get("pack_dtype", "int32") != "int32":
        raise UnsupportedModelError(f"{module} is in GPTQ's layout {layout}, which is not read", OTHERWISE)
    words, outputs = parts["qweight"].empty.shape
    bits = settings["bits"] if "g_idx" not in parts else 32 * words // parts["g_idx"].empty.shape[0]
    inputs = 32 * words // bits

    def read() -> Any:
        scales = parts["scales"][...].float().T
        groups = parts["g_idx"][...].long() if "g_idx" in parts else _groups(inputs, scales.shape[1])
        if parts["qzeros"].empty.numel():
            zeros = _unpack(parts["qzeros"][...], bits, outputs).T
            if layout == "gptq":  # stored less 1
                if (zeros == 2**bits - 1).any():
                    message = (
                        f"{module} has zero points of {2**bits}; readers of GPTQ's first layout disagree on what these mean"
                    )
                    raise UnsupportedModelError(message, OTHERWISE)
                zeros = zeros + 1
        else:
            zeros = torch.full_like(scales, 2 ** (bits - 1), dtype=torch.int32)
        return Integers(_unpack(parts["qweight"][...].T, bits, inputs), scales, groups, zeros)

    more = {"zeros", "groups"} if "g_idx" in parts else {"zeros"}
    return PackedWeight(module, (outputs, inputs), read, _GROUPED | more)


def _compressed(module: str, parts: Parts, settings: Mapping[str, Any]) -> PackedWeight:
    """Read compressed-tensors: integers in words, or numbers in bytes."""
    if "weight_packed" not in parts:
        return _in_bytes(module, parts, settings)
    if "weight_global_scale" in parts or parts["weight_scale"].empty.dtype == torch.uint8:
        raise UnsupportedModelError(f"{module} is in FP4, which is not read", OTHERWISE)
    outputs, words = parts["weight_packed"].empty.shape
    shape = int(parts["weight_shape"][...][0]), int(parts["weight_shape"][...][1])
    bits = next((bits for bits in range(1, 9) if -(-shape[1] * bits // 32) == words), 0)
    if not bits or shape[0] != outputs:
        raise SourceError(f"the weights of {module} do not fit its shape {shape}", AGAIN)

    def read() -> Any:
        scales = parts["weight_scale"][...].float()
        integers = _unpack(parts["weight_packed"][...], bits, shape[1]) - 2 ** (bits - 1)
        groups = parts["weight_g_idx"][...].long() if "weight_g_idx" in parts else _groups(shape[1], scales.shape[1])
        zeros = None
        if "weight_zero_point" in parts:
            zeros = _unpack(parts["weight_zero_point"][...].T, bits, outputs).T - 2 ** (bits - 1)
        return Integers(integers, scales, groups, zeros)

    more = {content for part, content in (("weight_zero_point", "zeros"), ("weight_g_idx", "groups")) if part in parts}
    return PackedWeight(module, shape, read, _GROUPED | more)


def _modelopt(module: str, parts: Parts, settings: Mapping[str, Any]) -> PackedWeight:
    """Read ModelOpt's FP8."""
    if (algorithm := settings.get("quant_algo")) != "FP8":
        raise UnsupportedModelError(f"{module} is quantized by ModelOpt's {algorithm}; only FP8 is read", OTHERWISE)
    return _in_bytes(module, parts, {})


def _in_bytes(module: str, parts: Parts, settings: Mapping[str, Any]) -> PackedWeight:
    """Read integers or FP8, with one scale for a tensor, rows, groups of inputs or blocks."""
    outputs, inputs = parts["weight"].empty.shape
    schemes = [each.get("weights") or {} for each in settings.get("config_groups", {}).values()]
    blocks = next((scheme["block_structure"] for scheme in schemes if scheme.get("block_structure")), (0, 0))

    def spread(part: str) -> Any:
        values = parts[part][...].float()
        values = values.reshape(len(values), -1) if values.dim() else values.reshape(1, 1)
        for axis, (size, block) in enumerate(zip((outputs, inputs), blocks, strict=True)):
            repeated = values.repeat_interleave(block or size // values.shape[axis], axis)
            values = repeated.narrow(axis, 0, size)  # the last block may be cut
        return values

    def read() -> Any:
        zeros = spread("weight_zero_point") if "weight_zero_point" in parts else None
        return Integers(parts["weight"][...].float(), spread("weight_scale"), torch.arange(inputs), zeros)

    if parts["weight"].empty.dtype.is_floating_point:
        return PackedWeight(module, (outputs, inputs), lambda: read().weight())
    more = {"zeros"} if "weight_zero_point" in parts else set()
    return PackedWeight(module, (outputs, inputs), read, _GROUPED | more)


def _groups(inputs: int, count: int) -> torch.Tensor:
    """Return the group of each input, int64 [K], of `count` groups of equal size."""
    if inputs % count:
        raise ValueError(f"{inputs} inputs in {count} groups")
    return torch.arange(inputs) // (inputs // count)


def _unpack(words: torch.Tensor, bits: int, count: int) -> Any:
    """Return `count` integers of each row, int32 [R, count], of words int32 [R, W]: their bits in order, from the lowest on."""
    if 32 % bits == 0:
        places = bits * torch.arange(32 // bits, dtype=torch.int32)
        return (words[..., None] >> places & 2**bits - 1).flatten(1)[:, :count]
    data = np.ascontiguousarray(words.numpy()).view(np.uint8)
    stream = np.unpackbits(data, axis=1, bitorder="little")[:, : count * bits].reshape(len(data), count, bits)
    return torch.from_numpy((stream * (1 << np.arange(bits, dtype=np.int32))).sum(-1, dtype=np.int32))


_GROUPED = frozenset({"integers", "scales"})
_COMPRESSED = {"weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "input_scale"}
METHODS: dict[str, tuple[str, set[str], Callable[[str, Parts, Mapping[str, Any]], PackedWeight]]] = {
    "awq": ("qweight", {"qweight", "qzeros", "scales"}, _awq),
    "gptq": ("qweight", {"qweight", "qzeros", "scales", "g_idx"}, _gptq),
    "compressed-tensors": ("weight_scale", _COMPRESSED, _compressed),
    "modelopt": ("weight_scale", {"weight", "weight_scale", "input_scale"}, _modelopt),
}
"""Methods: the tensor that marks a quantized module, the tensors that a weight replaces, and the function that reads it."""
