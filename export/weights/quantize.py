"""Int4 and int8 weights: rounded in blocks before tracing, and stored with standard ONNX `DequantizeLinear` nodes.

A quantized model is an ordinary PyTorch model, so the parity check compares the graph with exactly the rounded weights.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx_ir as ir
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from outrider.bundle.manifest import Quantization
from outrider.export.checkpoints.streamed import Streamed
from outrider.export.checkpoints.tokenizer import TokenizerFiles
from outrider.export.graph.experts import BlockExperts, Stack, gate_of, packed
from outrider.export.graph.features import FEATURE_MIXER
from outrider.export.heads.short_head import output_head
from outrider.export.weights.auto_round import tune
from outrider.export.weights.block_linear import BlockLinear
from outrider.export.weights.rounding import AS_IS, BITS, Rounding
from outrider.export.weights.stored import Form, StoredWeight, stored_weights

MIN_IMPORTANCE = 0.05  # of a weight; a block's greatest weight has the importance 1.05
# Scales to try, by bits: a block's greatest weight as a multiple of the greatest integer. Above 1 the weight is clipped, which
# helps the other weights. Eight bits gain nothing from clipping.
SCALE_FACTORS = {4: (0.95, 1.0, 1.05, 1.1, 1.15, 1.2, 1.3), 8: (1.0,)}
# The tiles of a matrix that are rounded together: a MiB in fp32, with a whole number of blocks.
WEIGHTS_AT_ONCE, COLUMNS_AT_ONCE = 2**18, 2**10


def quantize(weight: torch.Tensor, bits: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round weights, float32 [N, K], to int8 [K, N] and positive float32 scales [K / block, N].

    For each block, several scales are tried and refitted to minimize sum(a (w - scale q)^2). The importance a of a weight w is
    |w| as a share of the block's greatest weight, plus `MIN_IMPORTANCE`. Given the integers q of a tried scale, the best scale
    is sum(a w q) / sum(a q q), and the remaining error is sum(a w w) - sum(a w q)^2 / sum(a q q). llama.cpp does nearly the
    same (`make_qx_quants` in ggml-quants.c), but allows negative scales, which TensorRT does not.

    The importance is empirical: on a 0.5B model it halves the loss with blocks of 128.
    """
    outputs, inputs = weight.shape
    rounded, scale = torch.empty(inputs, outputs, dtype=torch.int8), torch.empty(inputs // block, outputs)
    columns = min(inputs, COLUMNS_AT_ONCE // block * block)
    rows = max(1, WEIGHTS_AT_ONCE // columns)

    def round_tile(corner: tuple[int, int]) -> None:
        first, start = corner
        some = slice(first, first + rows)
        blocks = weight[some, start : start + columns].T.float().reshape(-1, block, len(weight[some]))
        integers, scales = _rounded(blocks, bits)
        rounded[start : start + columns, some] = integers.flatten(0, 1)
        scale[start // block : start // block + len(scales), some] = scales

    threads = torch.get_num_threads()
    try:  # each tile in one thread: torch's own threads would wait for each other after every operation
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(round_tile, itertools.product(range(0, outputs, rows), range(0, inputs, columns))))
    finally:
        torch.set_num_threads(threads)  # MKL has one number for the whole process
    return rounded, scale


def _rounded(blocks: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return some blocks, float32 [B, block, N], as integers of this shape and scales [B, N]. N is last, as it is long."""
    limit = 2 ** (bits - 1)
    spare = blocks.abs()
    greatest = spare.amax(1, keepdim=True)
    greatest = torch.where(greatest > 0, greatest, 1.0)
    blocks = blocks / greatest
    importance = torch.abs(blocks, out=spare) + MIN_IMPORTANCE
    weighted, integers = importance * blocks, torch.empty_like(blocks)
    best = torch.full_like(greatest[:, 0], -1.0)
    chosen, scales = torch.ones_like(best), torch.ones_like(best)
    for factor in [(limit - 1) * each for each in SCALE_FACTORS[bits]]:
        torch.mul(blocks, factor, out=integers).round_().clamp_(-limit, limit - 1)
        fit = torch.mul(weighted, integers, out=spare).sum(1)
        power = integers.square_().mul_(importance).sum(1)
        gain = torch.where(power > 0, fit * fit / power, 0.0)
        better = gain > best
        best = torch.where(better, gain, best)
        scales = torch.where(better & (power > 0), fit / power, scales)
        chosen = torch.where(better, factor, chosen)
    torch.mul(blocks, chosen[:, None], out=integers).round_().clamp_(-limit, limit - 1)
    return integers, scales * greatest[:, 0]


def _integers(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of `quantize` for weights [N, K] that are already multiples of scales [N, K / block]."""
    integers = (weight.reshape(*scale.shape, -1) / scale[..., None]).round()
    return integers.reshape(len(weight), -1).T.to(torch.int8).contiguous(), scale.T.float().contiguous()


def quantize_model(
    model: PreTrainedModel, weights: Streamed, rounding: Rounding, tokenizer: TokenizerFiles, positions: int | None
) -> Quantization:
    """Replace linear layers (`nn.Linear` and GPT-2's `Conv1D`) by `BlockLinear`, and mixtures' experts by `BlockExperts`.

    Embeddings are looked up, not multiplied, so quantizing them would not save time. They are rounded to fp16, which halves
    their memory and loses almost nothing if the table is in bf16. A head that is tied to its embedding gets separate weights.
    Weights that are not in memory are read layer by layer, and the rounded ones are stored where `weights` puts them.

    Raises:
        UsageError, UnsupportedModelError: see `tune`.
    """
    if rounding.method == "auto-round":
        weights.keep_all()
        tune(model, rounding, tokenizer, positions)
    head = output_head(model)
    layers, experts = list[BlockLinear](), list[BlockExperts]()
    for part in [[], *([each] for each in weights.parts)]:  # first what is in memory anyway
        stored = stored_weights(weights, part[0]) if part and rounding.method == AS_IS else {}
        with weights.part(*part):
            layers += _replace_linears(model, head, rounding, weights, stored)
            experts += _replace_experts(model, rounding, weights, stored)
            _round_embeddings(model, weights)
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = {name: each for name, each in model.named_parameters() if each.dim() > 1 and each not in tables}
    return Quantization(
        method=rounding.method,
        head_precision=rounding.head_precision,
        block=rounding.max_block(BITS[rounding.precision]),
        weights=sum(layer.quantized.numel() for layer in layers) + sum(each.weights for each in experts),
        rounded=[name for name, each in model.named_modules() if rounding.method == AS_IS and not getattr(each, "exact", True)],
        kept={name: matrix.numel() for name, matrix in matrices.items()},
    )


def _replace_linears(
    model: PreTrainedModel, head: nn.Module, rounding: Rounding, weights: Streamed, stored: Mapping[str, StoredWeight]
) -> list[BlockLinear]:
    """Round the layers that are in memory, or keep what is stored of them."""
    layers: dict[nn.Module, BlockLinear] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if not isinstance(module, nn.Linear | Conv1D) or module.weight.is_meta:
            continue
        # The feature mixer is small, and its errors would be in everything that a draft head reads.
        finer = module is head or name.startswith(FEATURE_MIXER) or rounding.method == AS_IS
        bits = BITS.get(rounding.head_precision if finer else rounding.precision)
        weight = module.weight.detach() if isinstance(module, nn.Linear) else module.weight.detach().T
        if module not in layers:
            form = kept = _kept(stored.get(f"{name}.weight"), weight, rounding, is_head=module is head)
            if form is None and bits is not None and (block := rounding.block_for(weight.shape[1], bits)) is not None:
                tuned_scale = getattr(module, "scale", None)
                rounded = quantize(weight, bits, block) if tuned_scale is None else _integers(weight, tuned_scale)
                form = Form(*rounded, bits)
            if form is None:
                continue
            layers[module] = BlockLinear(form.map(weights.store), module.bias, exact=kept is not None)
        model.set_submodule(name, layers[module])
    return list(layers.values())


def _kept(stored: StoredWeight | None, weight: torch.Tensor, rounding: Rounding, is_head: bool) -> Form | None:
    """Return what is stored of weights [N, K] in a form for the kernels, or None if no form has exactly these weights."""
    form = None if stored is None else stored.form(weight, rounding.max_block(4))
    return form if form is None or not is_head or form.is_one_product else None  # backends look for the head's product


def _replace_experts(
    model: PreTrainedModel, rounding: Rounding, weights: Streamed, stored: Mapping[str, StoredWeight]
) -> list[BlockExperts]:
    """Round experts with a known gate that are in memory, or keep what is stored of them; others stay in fp32."""
    replaced = []
    for name, module in list(model.named_modules()):
        matrix = getattr(module, "gate_up_proj", None)
        if not isinstance(matrix, nn.Parameter) or matrix.is_meta or (gate := gate_of(module)) is None:
            continue
        projections = {}
        for projection in ("gate_up_proj", "down_proj"):
            matrices = getattr(module, projection).detach()
            projections[projection] = matrices.transpose(1, 2) if module.is_transposed else matrices  # [E, N, K]
        kept = _kept_experts([(each, stored.get(f"{name}.{projection}")) for projection, each in projections.items()], rounding)
        if (forms := kept or _rounded_experts(list(projections.values()), rounding)) is None:
            continue
        stacks = []
        for (projection, matrices), every in zip(projections.items(), forms, strict=True):
            bias = getattr(module, f"{projection}_bias").detach() if module.has_bias else torch.zeros(matrices.shape[:2])
            bytes_ = torch.stack([packed(form.quantized.T, form.bits) for form in every])
            parts = [bytes_, torch.stack([form.scale.T for form in every]), bias.float()]
            if projection == "gate_up_proj" and module.is_concatenated:
                parts = [torch.stack(each.chunk(2, 1), 2).flatten(1, 2) for each in parts]
            stacks.append(Stack(*map(weights.store, parts)))
        replaced.append(BlockExperts(stacks[0], stacks[1], gate, forms[0][0].bits, exact=kept is not None))
        model.set_submodule(name, replaced[-1])
    return replaced


def _rounded_experts(projections: list[torch.Tensor], rounding: Rounding) -> list[list[Form]] | None:
    """Round the matrices [E, N, K] of each projection in blocks of one size, or return None if there is no such size."""
    bits = BITS.get(rounding.head_precision if rounding.method == AS_IS else rounding.precision)
    block = None if bits is None else rounding.block_for(_common_inputs(projections), bits)
    if bits is None or block is None:
        return None
    return [[Form(*quantize(each, bits, block), bits) for each in matrices] for matrices in projections]


def _kept_experts(projections: list[tuple[torch.Tensor, StoredWeight | None]], rounding: Rounding) -> list[list[Form]] | None:
    """Return the stored matrices [E, N, K] of each projection, or None if they have offsets, an order or different blocks.

    Kernels for experts know no zero points. If any matrix has them, all are in 8 bits.
    """
    block = rounding.block_for(_common_inputs([matrices for matrices, _ in projections]), 4)
    kept = []
    for matrices, stored in projections:
        if stored is None or block is None or stored.integers.shape != matrices.shape:
            return None
        forms = [stored.of(at).form(each, block) for at, each in enumerate(matrices)]
        kept.append([form for form in forms if form is not None and form.is_one_product])
    every = [form for forms in kept for form in forms]
    if any(form.zero is not None and form.bits == 8 for form in every):
        return None
    if any(form.zero is not None for form in every) or len({form.bits for form in every}) > 1:
        kept = [[form.in_bytes() for form in forms] for forms in kept]
    whole = len(every) == sum(len(matrices) for matrices, _ in projections)
    return kept if whole and len({len(form.quantized) // len(form.scale) for form in every}) == 1 else None


def _common_inputs(projections: list[torch.Tensor]) -> int:
    return math.gcd(*(matrices.shape[2] for matrices in projections))


def _round_embeddings(model: PreTrainedModel, weights: Streamed) -> None:
    for module in model.modules():
        # With a greater number, the table stays in fp32.
        if isinstance(module, nn.Embedding) and not module.weight.is_meta and _of_half(module.weight).isfinite().all():
            weights.change(module, "weight", _round_to_half)


def _round_to_half(table: torch.Tensor) -> torch.Tensor:
    return table.half().to(table.dtype)


def _of_half(table: torch.Tensor) -> torch.Tensor:
    return torch.stack(torch.aminmax(table)).half()


def pack(program: torch.onnx.ONNXProgram, model: PreTrainedModel, weights: Streamed) -> None:
    """Store a traced model's int4 weights in half a byte each, and its embeddings in fp16.

    torch has no int4, so the trace has int8. Its initializers have the names of the model's tensors.
    """
    graph = program.model.graph
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, BlockLinear):
            if module.bits == 4:
                _pack_integers(graph, f"model.{name}", module, weights)
            continue
        value = graph.initializers.get(f"model.{name}.weight")
        if value is None or value.const_value is None:  # not used in the trace
            continue
        if (
            value.dtype == ir.DataType.FLOAT
            and isinstance(module, nn.Embedding)
            and all(node.op_type == "Gather" for node, _ in value.uses())
            and (weights.is_changed(f"{name}.weight", _round_to_half) or _is_half(value.const_value))
        ):
            value.const_value = weights.lazy(value, functools.partial(_half, value.const_value), ir.DataType.FLOAT16)
            value.dtype = ir.DataType.FLOAT16
            for node, _ in value.uses():
                _cast_up(graph, node)


def _pack_integers(graph: ir.Graph, name: str, module: BlockLinear, weights: Streamed) -> None:
    dtype = ir.DataType.INT4 if module.zero is None else ir.DataType.UINT4
    for part in ("quantized", "zero"):
        value = graph.initializers.get(f"{name}.{part}")
        if value is not None and value.const_value is not None:
            value.const_value = weights.lazy(value, functools.partial(_pairs, value.const_value, dtype), dtype)
            value.dtype = dtype


def _pairs(integers: ir.TensorProtocol, dtype: ir.DataType) -> ir.TensorProtocol:
    values = integers.numpy()
    pairs = values.reshape(-1, 2).view(np.uint8) & 15
    return ir.PackedTensor(pairs[:, 0] | pairs[:, 1] << 4, dtype, shape=ir.Shape(values.shape))


def _half(table: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.tensor(table.numpy().astype(np.float16))


def _is_half(table: ir.TensorProtocol) -> bool:
    return np.array_equal(table.numpy().astype(np.float16), table.numpy())


def _cast_up(graph: ir.Graph, gather: ir.Node) -> None:
    """Cast rows from an fp16 table to fp32."""
    rows = gather.outputs[0]
    cast = ir.node("Cast", [rows], {"to": int(ir.DataType.FLOAT)})
    (cast.outputs[0].dtype, cast.outputs[0].shape) = (ir.DataType.FLOAT, rows.shape)
    rows.dtype = ir.DataType.FLOAT16
    rows.replace_all_uses_with(cast.outputs[0])
    cast.replace_input_with(0, rows)
    graph.insert_after(gather, cast)
