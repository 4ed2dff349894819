"""Weights of int4 or int8: rounded in blocks before tracing, and stored as standard ONNX `DequantizeLinear` nodes.

The quantized model is an eager model like any other, so the parity check compares the graph with exactly what was rounded.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from tokenizers import Tokenizer
from torch import nn
from torch.onnx.ops import symbolic
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.pytorch_utils import Conv1D

from outrider.bundle.manifest import Quantization
from outrider.errors import UnsupportedModelError, UsageError
from outrider.export.source import TokenizerFiles
from outrider.export.step_model import OPSET

BITS = {"int4": 4, "int8": 8}
BLOCKS = (128, 64, 32)  # inputs that share a scale. A layer whose inputs are not two or more such blocks stays in fp32
# The largest blocks, by bits, with which ONNX Runtime's kernels on the CPU give a row the same bits in any company. Larger ones
# lose more, but take less time.
STEADY = {4: 32, 8: 64}
FAINT = 0.05  # of a block's greatest weight: what the least of them still counts for
# Where the greatest weight of a block may land, as multiples of the greatest integer: beyond 1 it is cut off, for the good
# of the others. Eight bits have nothing to gain by that.
REACHES = {4: (0.95, 1.0, 1.05, 1.1, 1.15, 1.2, 1.3), 8: (1.0,)}
METHODS = ("rtn", "auto-round")
CALIBRATION, PIECES, BATCH = 512, 128, 8  # tokens of a piece of calibration text, most pieces, pieces of a step
ITERATIONS = 50  # AutoRound's own "light" recipe; its default of 200 gains little more
PIECE = 2**24  # weights that are rounded at a time, for the sake of memory


@dataclass(frozen=True, slots=True)
class Rounding:
    """How weights are to be rounded."""

    precision: str  # int4 or int8
    # Of the product that gives the logits: int4, int8 or fp32. No layer comes after it to even its errors out: eight bits
    # there lose nothing that perplexity shows, and four lose nearly a fifth of what all other layers together do.
    head_precision: str = "int8"
    method: str = "rtn"  # of METHODS, for the blocks' layers
    text: str = ""  # for calibration
    steady: bool = True  # blocks up to STEADY; else up to the largest

    @classmethod
    def asked(cls, precision: str, head_precision: str | None, method: str | None, calibration: Path | None) -> Rounding | None:
        """What options ask for; None where weights are not quantized.

        Raises:
            UsageError: they do not go with each other, or the text cannot be read.
        """
        options = {"--head-precision": head_precision, "--method": method, "--calibration": calibration}
        if precision not in BITS:
            if given := [name for name, value in options.items() if value is not None]:
                raise UsageError(f"{given[0]} does not go with --precision {precision}", "give --precision int4 or int8, too")
            return None
        if (method == "auto-round") != (calibration is not None):
            raise UsageError("--method auto-round and --calibration go together", "give both or neither")
        if method == "auto-round" and precision != "int4":
            raise UsageError("--method auto-round is for --precision int4", "leave it out: eight bits need no tuning")
        try:
            text = calibration.read_text(encoding="utf-8") if calibration is not None else ""
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read {calibration}: {error}", "give --calibration a text file in UTF-8") from error
        return cls(precision, head_precision or "int8", method or "rtn", text)

    def of_draft(self, head_precision: str | None) -> Rounding:
        """As this, but for the draft, whose errors cost acceptance and nothing else: what is fastest, but for the head's
        precision where one was asked for."""
        return replace(self, steady=False, head_precision=head_precision or self.precision)

    def block(self, bits: int) -> int:
        """How many inputs share a scale at most."""
        return STEADY[bits] if self.steady else BLOCKS[0]

    def block_of(self, inputs: int, bits: int) -> int | None:
        """How many inputs share a scale in a layer of so many; None where it cannot be rounded. They are never all of them:
        TensorRT-RTX's compiler fails on a layer of one block."""
        most = self.block(bits)
        return next((block for block in BLOCKS if block <= most and inputs % block == 0 and block < inputs), None)


class BlockLinear(nn.Module):
    """A linear layer of which each block of inputs has one scale for each output: y = x W + bias.

    Buffers: `quantized`, int8 [K, N] of `bits` bits; `scale`, float32 [K / block, N]; `bias`, float32 [N] or None.
    """

    quantized: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, quantized: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, bits: int):
        super().__init__()
        self.bits = bits
        self.register_buffer("quantized", quantized)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if bias is None else bias.detach())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Float32 [..., K] -> [..., N]."""
        if torch.compiler.is_exporting():
            # Weights as [K, N], axis 0: the only layout that ONNX Runtime fuses with the product, into MatMulNBits.
            weight = symbolic(
                "DequantizeLinear",
                (self.quantized, self.scale),
                {"axis": 0, "block_size": len(self.quantized) // len(self.scale)},
                dtype=torch.float32,
                shape=self.quantized.shape,
                version=OPSET,
            )
        else:
            weight = dequantize(self.quantized, self.scale)
        product = rows @ weight
        return product if self.bias is None else product + self.bias


def quantize(weight: torch.Tensor, bits: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round float32 [N, K] to the nearest, into int8 [K, N] and float32 scales [K / block, N], all of them positive.

    For each block several scales are tried. What is made least is the squared error, that of a weight w counted as its size a
    (|w| as a share of the block's greatest one, and `FAINT`): sum(a (w - scale q)^2). Given the integers q of a scale tried,
    scale = sum(a w q) / sum(a q q) is best, and leaves sum(a w w) - sum(a w q)^2 / sum(a q q). llama.cpp does about the same
    (`make_qx_quants` in ggml-quants.c), with negative scales, too, which TensorRT does not take.

    That large weights count for more is of experience, not of theory: on a model of 0.5B it halves what blocks of 128 lose.
    """
    outputs, inputs = weight.shape
    most = 2 ** (bits - 1)
    quantized = torch.empty(inputs, outputs, dtype=torch.int8)
    scale = torch.empty(inputs // block, outputs)
    step = max(1, PIECE // inputs)
    for first in range(0, outputs, step):
        piece = weight[first : first + step].float().reshape(-1, inputs // block, block)
        greatest = piece.abs().amax(-1, keepdim=True)
        greatest = torch.where(greatest > 0, greatest, 1.0)
        piece = piece / greatest
        size = piece.abs() + FAINT
        weighted = size * piece
        best = torch.full(piece.shape[:2], -1.0)
        chosen, scales = torch.zeros_like(piece), torch.ones_like(best)
        for reach in REACHES[bits]:
            integers = (piece * ((most - 1) * reach)).round_().clamp_(-most, most - 1)
            fit, power = (weighted * integers).sum(-1), (size * integers.square()).sum(-1)
            gain = torch.where(power > 0, fit * fit / power, 0.0)
            better = gain > best
            best = torch.where(better, gain, best)
            scales = torch.where(better & (power > 0), fit / power, scales)
            chosen = torch.where(better[..., None], integers, chosen)
        end = first + len(piece)
        quantized[:, first:end] = chosen.reshape(-1, inputs).T.to(torch.int8)
        scale[:, first:end] = (scales * greatest[..., 0]).T
    return quantized, scale


def _integers(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `quantize`, of weights [N, K] that are multiples of scales [N, K / block] already."""
    integers = (weight.reshape(*scale.shape, -1) / scale[..., None]).round()
    return integers.reshape(len(weight), -1).T.to(torch.int8).contiguous(), scale.T.float().contiguous()


def dequantize(quantized: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What `DequantizeLinear` computes: int8 [K, N] and float32 [K / block, N] -> float32 [K, N]."""
    blocks, outputs = scale.shape
    return (quantized.reshape(blocks, -1, outputs) * scale[:, None]).reshape(-1, outputs)


def tune(model: PreTrainedModel, rounding: Rounding, tokenizer: TokenizerFiles, positions: int | None) -> None:
    """Round the linear layers of a model's blocks to int4 by AutoRound (SignRound, arXiv:2309.05516), from a text.

    Their weights stay floating, each an integer times the layer's new attribute `scale`, float32 [N, K / block].

    Raises:
        UsageError: the text is too short, or the package is not there.
        UnsupportedModelError: AutoRound fails.
    """
    encoder = Tokenizer.from_str(tokenizer.json)
    length = min(CALIBRATION, positions or CALIBRATION)
    tokens = encoder.encode(rounding.text, add_special_tokens=False).ids
    starts = range(0, len(tokens) - length + 1, length)[:PIECES]
    pieces = [torch.tensor([tokens[start : start + length]]) for start in starts]
    if len(pieces) < BATCH:
        raise UsageError(
            f"the calibration text has {len(tokens):,} tokens, and at least {BATCH * length:,} are needed",
            f"give a longer one; up to {PIECES * length:,} are used",
        )
    try:
        from auto_round import AutoRound
    except ImportError as error:
        raise UsageError(f"what --method auto-round needs is missing: {error}", "pip install 'outrider[quantize]'") from error
    logging.getLogger("autoround").setLevel(logging.WARNING)
    head = _head(model)  # which it leaves alone unless it is named
    blocks = {
        name: None if isinstance(module, Conv1D) else rounding.block_of(module.in_features, 4)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }
    try:
        AutoRound(
            model,
            tokenizer=PreTrainedTokenizerFast(tokenizer_object=encoder),
            bits=4,
            group_size=rounding.block(4),
            sym=True,
            data_type="int_sym_gptq",  # its other symmetric type has negative scales
            scale_dtype="fp32",
            amp=False,  # bf16
            iters=ITERATIONS,
            dataset=[{"input_ids": piece, "attention_mask": torch.ones_like(piece)} for piece in pieces],
            nsamples=len(pieces),
            seqlen=length,
            batch_size=BATCH,
            layer_config={
                name: {"bits": 16, "data_type": "float"} if block is None else {"bits": 4, "group_size": block}
                for name, block in blocks.items()
                if block != rounding.block(4)
            },
            device_map="cpu",
            enable_torch_compile=False,
        ).quantize()
    except Exception as error:  # it names no base for what it raises
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UnsupportedModelError(
            f"AutoRound cannot round {type(model).__name__}: {reason[:300]}", "export with --method rtn"
        ) from error
    model.requires_grad_(False)


def quantize_model(
    model: PreTrainedModel, rounding: Rounding, tokenizer: TokenizerFiles, positions: int | None
) -> Quantization:
    """Put a `BlockLinear` in place of every linear layer (`nn.Linear`, and GPT-2's `Conv1D`), and say what stays.

    Embeddings are looked up and not multiplied, so they cost no time; rounded to fp16, a table takes half the memory, and
    a table of bf16 loses nothing of note. A head tied to its embedding gets weights of its own.

    Raises:
        UsageError, UnsupportedModelError: as `tune`.
    """
    if rounding.method == "auto-round":
        tune(model, rounding, tokenizer, positions)
    head = _head(model)
    made: dict[nn.Module, BlockLinear] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if not isinstance(module, nn.Linear | Conv1D):
            continue
        bits = BITS.get(rounding.head_precision if module is head else rounding.precision)
        weight = module.weight.detach() if isinstance(module, nn.Linear) else module.weight.detach().T
        block = None if bits is None else rounding.block_of(weight.shape[1], bits)
        if bits is None or block is None:
            continue
        if module not in made:
            tuned = getattr(module, "scale", None)
            rounded = quantize(weight, bits, block) if tuned is None else _integers(weight, tuned)
            made[module] = BlockLinear(*rounded, module.bias, bits)
        model.set_submodule(name, made[module])
    for module in [module for module in model.modules() if isinstance(module, nn.Embedding)]:
        half = module.weight.half()
        if half.isfinite().all():  # else it stays as it is, and in fp32
            module.weight = nn.Parameter(half.float(), requires_grad=False)  # a new one: a tied head keeps its own
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = {name: each for name, each in model.named_parameters() if each.dim() > 1 and each not in tables}
    return Quantization(
        method=rounding.method,
        head_precision=rounding.head_precision,
        block=rounding.block(BITS[rounding.precision]),
        weights=sum(layer.quantized.numel() for layer in made.values()),
        kept={name: matrix.numel() for name, matrix in matrices.items()},
    )


def _head(model: PreTrainedModel) -> nn.Module | None:
    """The product that gives the logits."""
    head = model.get_output_embeddings()
    rows: nn.Module | None = getattr(head, "rows", head)  # of a `ShortHead`
    return rows


def pack(program: torch.onnx.ONNXProgram, model: PreTrainedModel) -> None:
    """Store the int4 weights of a traced model as such, two to a byte, and its embeddings in fp16.

    torch has no int4, so the trace holds int8. Its initializers go by the names of the model's own tensors.
    """
    graph = program.model.graph
    for name, module in model.named_modules(remove_duplicate=False):
        value = graph.initializers.get(f"model.{name}.{'quantized' if isinstance(module, BlockLinear) else 'weight'}")
        if value is None or value.const_value is None:  # a part that the trace did not come by
            continue
        if isinstance(module, BlockLinear) and module.bits == 4:
            pairs = value.const_value.numpy().reshape(-1, 2).view(np.uint8) & 15
            packed = ir.PackedTensor(pairs[:, 0] | pairs[:, 1] << 4, ir.DataType.INT4, shape=module.quantized.shape)
            (value.const_value, value.dtype) = (packed, ir.DataType.INT4)
        elif isinstance(module, nn.Embedding) and all(node.op_type == "Gather" for node, _ in value.uses()):
            table = value.const_value.numpy().astype(np.float16)
            if np.array_equal(table, value.const_value.numpy()):
                (value.const_value, value.dtype) = (ir.tensor(table), ir.DataType.FLOAT16)
                for node, _ in value.uses():
                    _cast_up(graph, node)


def _cast_up(graph: ir.Graph, gather: ir.Node) -> None:
    """Give fp32 to whatever reads the rows of a table in fp16."""
    rows = gather.outputs[0]
    cast = ir.node("Cast", [rows], {"to": int(ir.DataType.FLOAT)})
    (cast.outputs[0].dtype, cast.outputs[0].shape) = (ir.DataType.FLOAT, rows.shape)
    rows.dtype = ir.DataType.FLOAT16
    rows.replace_all_uses_with(cast.outputs[0])
    cast.replace_input_with(0, rows)
    graph.insert_after(gather, cast)
