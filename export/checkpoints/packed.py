"""Read the weights of quantized safetensors checkpoints, without the libraries that wrote them.

A method stores several tensors for each quantized module. `unpacked` puts one weight in their place, which is computed when it
is read. What is quantized and in which groups follows from the tensors, so rules for single modules need no attention.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from outrider.errors import SourceError, UnsupportedModelError
from outrider.export.checkpoints.float_blocks import EXPONENTS, fp4, in_blocks, in_bytes, in_fp4, scales_of
from outrider.export.checkpoints.integers import Integers
from outrider.export.checkpoints.modelopt import MODELOPT, modelopt
from outrider.export.checkpoints.packed_weight import GROUPED, OTHERWISE, PackedWeight, Parts, groups_of
from outrider.export.checkpoints.source import AGAIN

AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)  # the places in a word of consecutive outputs
MXFP4_BYTES = 16  # for 32 numbers, which share a scale
SCALES = (".scale", ".qscale_weight")  # other names of the scales of a weight in FP8: DeepSeek's, Mistral's
SPARSE = {"bitmask", "scale_packed"}  # of compressed-tensors: tensors of the formats sparse-24-bitmask and marlin-24
# The methods that may leave out their name, by a setting of theirs.
UNNAMED = {"load_in_4bit": "bitsandbytes", "load_in_8bit": "bitsandbytes", "group_size": "MLX"}
# AutoRound's packing formats that are those of others, and the methods and layouts of these.
OF_AUTO_ROUND = {
    "auto_round": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round:gptqmodel": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "auto_round:auto_gptq": {"quant_method": "gptq", "checkpoint_format": "gptq"},
    "auto_round:auto_awq": {"quant_method": "awq", "version": "gemm"},
}
# Scales and zero points by which servers round activations and caches. These are not rounded here.
UNUSED = re.compile(
    r"(?:.*[._])?(?:qscale_act|(?:input|activation|output|prob|prob_output|q|k|v|kv)_(?:global_)?(?:scale|scale_ub|zero_point))"
)


def packing_of(settings: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Return the settings of a checkpoint's quantization as `unpacked` takes them; None if it is not quantized.

    Args:
        settings: as `Source.quantization` returns them.
        name: the checkpoint's, for errors.

    Raises:
        UnsupportedModelError: it is quantized by a method that is not read.
    """
    settings = _in_words_of_others(settings)
    method = settings.get("quant_method") or next((each for key, each in UNNAMED.items() if settings.get(key)), None)
    if method is not None and method not in {*METHODS, *OF_TRANSFORMERS}:
        form = f" ({form:.60})" if isinstance(form := settings.get("packing_format"), str) else ""
        raise UnsupportedModelError(f"{name} is quantized by {method}{form}, which is not read", OTHERWISE)
    return settings if method is not None else None


def _in_words_of_others(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return AutoRound's settings as those of the method in whose format it packs; others, and those of its own, unchanged."""
    form, bits = settings.get("packing_format"), settings.get("act_bits")
    if settings.get("quant_method") != "auto-round" or not isinstance(form, str):
        return settings
    rotated = any(value for key, value in settings.items() if "rotation" in key or "spinquant" in key)
    if rotated or bits not in (None, 16, 32) or settings.get("data_type", "int") != "int":
        return settings
    return {**settings, **OF_AUTO_ROUND.get(form, {})}


def unpacked(tensors: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a checkpoint, with one weight for each quantized module, and without those for activations.

    Args:
        tensors: those in the files, by name; `empty` has the shape, and indexing reads.
        settings: those of the quantization, from `packing_of`.

    Raises:
        UnsupportedModelError: the tensors are in a layout that is not read.
        SourceError: some are missing, now or when a weight is read.
    """
    tensors = {name: tensor for name, tensor in tensors.items() if not UNUSED.fullmatch(name)}
    if (read := OF_TRANSFORMERS.get(settings["quant_method"])) is not None:
        return read(tensors, settings)
    mark, own, make = METHODS[settings["quant_method"]]
    modules: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        modules[module][part] = tensor
    result = dict(tensors)
    for module, parts in modules.items():
        if sparse := SPARSE & parts.keys():
            raise UnsupportedModelError(f"{module} is sparse ({min(sparse)}), which is not read", OTHERWISE)
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
        return Integers(integers, parts["scales"][...].float().T, groups_of(inputs, zeros.shape[1]), zeros)

    return PackedWeight(module, (words * 8, inputs), read, GROUPED | {"zeros"})


def _gptq(module: str, parts: Parts, settings: Mapping[str, Any]) -> PackedWeight:
    """Read GPTQ's layouts: words of consecutive inputs; rows may belong to groups in any order."""
    layout = settings.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2") or settings.get("pack_dtype", "int32") != "int32":
        raise UnsupportedModelError(f"{module} is in GPTQ's layout {layout}, which is not read", OTHERWISE)
    words, outputs = parts["qweight"].empty.shape
    # Single modules may have other bits than the settings.
    if "g_idx" in parts:
        bits = 32 * words // parts["g_idx"].empty.shape[0]
    else:
        bits = 32 * parts["qzeros"].empty.shape[1] // outputs if "qzeros" in parts else 0
    bits = bits or settings["bits"]
    inputs = 32 * words // bits

    def read() -> Any:
        scales = parts["scales"][...].float().T
        groups = parts["g_idx"][...].long() if "g_idx" in parts else groups_of(inputs, scales.shape[1])
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
    return PackedWeight(module, (outputs, inputs), read, GROUPED | more)


def _compressed(module: str, parts: Parts, settings: Mapping[str, Any]) -> PackedWeight:
    """Read compressed-tensors: integers in words, FP4 in halves of bytes, or numbers in bytes."""
    if "weight_packed" not in parts:
        return in_bytes(module, parts, _blocks_of(module, parts, settings))
    outputs, words = parts["weight_packed"].empty.shape
    if (scale := parts["weight_scale"].empty).dtype.itemsize == 1:
        is_wider = scale.dtype == EXPONENTS and words != MXFP4_BYTES * scale.shape[1]  # MXFP6
        if "weight_zero_point" in parts or is_wider:
            raise UnsupportedModelError(f"{module} is in the format {settings.get('format')}, which is not read", OTHERWISE)
        return in_fp4(module, parts["weight_packed"], lambda: _scales_of_fp4(parts))
    shape = int(parts["weight_shape"][...][0]), int(parts["weight_shape"][...][1])
    bits = next((bits for bits in range(1, 9) if -(-shape[1] * bits // 32) == words), 0)
    if not bits or shape[0] != outputs:
        raise SourceError(f"the weights of {module} do not fit its shape {shape}", AGAIN)

    def read() -> Any:
        scales = parts["weight_scale"][...].float()
        integers = _unpack(parts["weight_packed"][...], bits, shape[1]) - 2 ** (bits - 1)
        groups = parts["weight_g_idx"][...].long() if "weight_g_idx" in parts else groups_of(shape[1], scales.shape[1])
        zeros = None
        if "weight_zero_point" in parts:
            zeros = _unpack(parts["weight_zero_point"][...].T, bits, outputs).T - 2 ** (bits - 1)
        return Integers(integers, scales, groups, zeros)

    more = {content for part, content in (("weight_zero_point", "zeros"), ("weight_g_idx", "groups")) if part in parts}
    return PackedWeight(module, shape, read, GROUPED | more)


def _blocks_of(module: str, parts: Parts, settings: Mapping[str, Any]) -> tuple[int, int]:
    """Return the size of the blocks that share a scale: the one in the settings that fits; (0, 0) for other forms.

    Raises:
        UnsupportedModelError: several fit.
    """
    schemes = [each.get("weights") or {} for each in settings.get("config_groups", {}).values()]
    sizes = sorted({tuple(each["block_structure"]) for each in schemes if each.get("block_structure")})
    shape, scales = parts["weight"].empty.shape, tuple(parts["weight_scale"].empty.shape)
    fitting = [(high, wide) for high, wide in sizes if (-(-shape[0] // high), -(-shape[1] // wide)) == scales]
    if len(fitting) > 1:
        either = " or ".join(f"{high}x{wide}" for high, wide in fitting)
        raise UnsupportedModelError(f"{module} is in FP8 in blocks of {either}; its settings do not tell which", OTHERWISE)
    in_other_form = len(scales) < 2 or scales[0] == shape[0] or scales == (1, 1)  # the blocks are those of other modules
    return next(iter(fitting or ([] if in_other_form else sizes)), (0, 0))


def _fp8(tensors: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Read FP8 of DeepSeek, Qwen, AutoFP8, FBGEMM and others: scales beside each weight, for all of it or blocks, multiply it.

    Experts of DeepSeek-V4 are in FP4, in bytes that have a sign.
    """
    result, (height, width) = dict(tensors), settings.get("weight_block_size") or (0, 0)
    for name, weight in tensors.items():
        if weight.empty.dtype not in (torch.float8_e4m3fn, torch.int8):
            continue
        names = [f"{name}_scale_inv", f"{name}_scale", *(re.sub(r"\.weight$", end, name) for end in SCALES)]
        scale = next((each for each in names if each in result and each != name), None)
        if scale is None:
            raise SourceError(f"{name} is quantized, but has no scale", AGAIN)
        scales = result.pop(scale)
        if weight.empty.dtype == torch.int8:
            result[name] = in_fp4(name, weight, functools.partial(scales_of, scales))
        else:
            result[name] = in_blocks(name, weight, scales, (height, width))
    return result


def _mxfp4(tensors: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Read GPT-OSS's experts: blocks [E, N, G, 16], of 32 inputs each, and exponents [E, N, G] of a weight [E, K, N]."""
    result = dict(tensors)
    for each in tensors:
        name = each.removesuffix("_blocks")
        if name != each:
            blocks, scales = result.pop(each), result.pop(f"{name}_scales", None)
            if scales is None:
                raise SourceError(f"{name} is quantized, but has no scale", AGAIN)
            result[name] = _experts(name, blocks, scales)
    return result


def _experts(name: str, blocks: Any, scales: Any) -> PackedWeight:
    experts, outputs, groups, bytes_ = blocks.empty.shape

    def read() -> torch.Tensor:
        weight = torch.empty(experts, 2 * groups * bytes_, outputs)
        # One after another, because all at once take several times the memory.
        for each, packed, scale in zip(weight, blocks[...], scales_of(scales), strict=True):
            each.copy_(fp4(packed.flatten(1), scale).T)
        return weight

    return PackedWeight(name, (experts, 2 * groups * bytes_, outputs), read)


def _scales_of_fp4(parts: Parts) -> torch.Tensor:
    """Return the scales of MXFP4, or those of NVFP4, which another number divides."""
    scale = parts["weight_scale"]
    return scales_of(scale) if scale.empty.dtype == EXPONENTS else scales_of(scale) / parts["weight_global_scale"][...].float()


def _unpack(words: torch.Tensor, bits: int, count: int) -> Any:
    """Return `count` integers of each row, int32 [R, count], of words int32 [R, W]: their bits in order, from the lowest on."""
    if 32 % bits == 0:
        places = bits * torch.arange(32 // bits, dtype=torch.int32)
        return (words[..., None] >> places & 2**bits - 1).flatten(1)[:, :count]
    data = np.ascontiguousarray(words.numpy()).view(np.uint8)
    stream = np.unpackbits(data, axis=1, bitorder="little")[:, : count * bits].reshape(len(data), count, bits)
    return torch.from_numpy((stream * (1 << np.arange(bits, dtype=np.int32))).sum(-1, dtype=np.int32))


_COMPRESSED = {"weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"}
_COMPRESSED |= {"weight_global_scale"}
METHODS: dict[str, tuple[str, set[str], Callable[[str, Parts, Mapping[str, Any]], PackedWeight]]] = {
    "awq": ("qweight", {"qweight", "qzeros", "scales"}, _awq),
    "gptq": ("qweight", {"qweight", "qzeros", "scales", "g_idx"}, _gptq),
    "compressed-tensors": ("weight_scale", _COMPRESSED, _compressed),
    "modelopt": ("weight_scale", MODELOPT, modelopt),
}
"""Methods: the tensor that marks a quantized module, the tensors that a weight replaces, and the function that reads it."""
OF_TRANSFORMERS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp8": _fp8,
    "mxfp4": _mxfp4,
}
"""Methods that transformers defines, and the functions that replace the tensors. It would read the whole model at once."""
