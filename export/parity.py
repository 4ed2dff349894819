"""Does the exported graph give the checkpoint's own logits? Asked after every export."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from outrider.backends.onnxruntime.engine import CPU, first_line, session_options
from outrider.bundle.manifest import Parity
from outrider.engines.contract import INPUT_IDS, KEY_POSITIONS, POSITIONS, cache_tensors
from outrider.engines.session import Floats
from outrider.errors import ParityError, UnsupportedModelError
from outrider.export.heldout import TEXT
from outrider.export.quantize import Rounding
from outrider.export.source import TokenizerFiles

CHUNKS = (7, 1, 5, 2, 9)  # rows of each run: prefill, decode and verify shapes, none a multiple of another
CAPACITY = 32
PIECE = 256  # tokens of held-out text that a model sees at once
BF16, FP32 = ir.DataType.BFLOAT16, ir.DataType.FLOAT

# Relative to the largest logit in magnitude, but no less than 1. fp32 differs by summation order only. In fp16 and bf16
# the checkpoint itself rounds after each operation (11 and 8 significant bits), where the graph on ONNX Runtime rounds
# its weights only; errors of a few roundings per layer add up.
# A quantized graph computes in fp32, and so does the quantized checkpoint that it is compared with.
TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1, "int4": 1e-4, "int8": 1e-4}
# How many times the fp32 perplexity a quantized model may have. Eight bits cost next to nothing, and four a few to twenty
# percent in models that are any good; half as much again is what the next smaller model of a family has.
COLLAPSE = {"int4": 1.5, "int8": 1.1}


def sample_tokens(vocab_tokens: int) -> torch.Tensor:
    """int64 [1, S] tokens spread over the vocabulary, the same each time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocab_tokens, (1, sum(CHUNKS)), generator=generator)


def reference(model: PreTrainedModel, tokens: torch.Tensor) -> tuple[Floats, list[tuple[int, int, int]]]:
    """The checkpoint's own logits, float32 [S, V], from one pass of its eager attention; and each layer's cache shape,
    (key/value heads, key width, value width).

    Raises:
        UnsupportedModelError: its state is not one key/value cache a layer.
    """
    with torch.no_grad():
        output = model(tokens, use_cache=True)
    cache = getattr(output, "past_key_values", None)
    if cache is None:
        raise UnsupportedModelError(f"{type(model).__name__} keeps no key/value cache")
    if not all(isinstance(layer, DynamicLayer) for layer in cache.layers):
        raise UnsupportedModelError(f"{type(model).__name__} keeps recurrent or hybrid state in its cache")
    layers = [(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) for layer in cache.layers]
    return output.logits[0].float().numpy(), layers


class Exported:
    """A graph as ONNX Runtime runs it."""

    def __init__(self, path: Path, layers: list[tuple[int, int, int]], precision: str, as_served: bool = False):
        """Load the graph. By default ONNX Runtime rounds activations, too, before it multiplies them by quantized weights;
        here it does only `as_served`.

        Raises:
            ParityError: ONNX Runtime refuses it.
        """
        options = session_options()
        options.log_severity_level = 3  # the cache is copied here on purpose, which it warns of
        if not as_served:
            options.add_session_config_entry("session.disable_prepacking", "1")  # packing keeps a second copy of the weights
            options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        graph = path
        if precision == "bf16":
            graph = _in_fp32(path)
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # folding would, too
        try:
            self._session = onnxruntime.InferenceSession(str(graph), options, providers=[CPU])
        except Exception as error:  # its exceptions share no base but Exception
            raise _unchecked(error) from error
        finally:
            if graph != path:
                graph.unlink()
        self._caches = cache_tensors(layers)
        self._dtype = np.float16 if precision == "fp16" else np.float32

    def logits(self, tokens: torch.Tensor, chunks: Sequence[int] = CHUNKS) -> Floats:
        """Float32 [S, V] of int64 [1, S] tokens, from runs of so many rows each.

        Raises:
            ParityError: a run failed.
        """
        capacity = max(CAPACITY, tokens.shape[1])
        past = {c.past: np.zeros((1, c.heads, capacity, c.width), dtype=self._dtype) for c in self._caches}
        logits, start = [], 0
        for rows in chunks:
            inputs = {
                INPUT_IDS: tokens[:, start : start + rows].numpy(),
                POSITIONS: np.array([start]),
                KEY_POSITIONS: np.arange(start + rows),
            }
            try:
                output, *present = self._session.run(None, inputs | past)
            except Exception as error:
                raise _unchecked(error) from error
            past = {c.past: array for c, array in zip(self._caches, present, strict=True)}
            logits.append(output[0])
            start += rows
        return np.concatenate(logits)


def heldout_tokens(tokenizer: TokenizerFiles, positions: int | None) -> list[torch.Tensor]:
    """The held-out text as int64 [1, S] pieces, each as long as one pass may be, and begun as the tokenizer begins a text."""
    encoder = Tokenizer.from_str(tokenizer.json)
    first = encoder.encode("").ids[:1]
    tokens = encoder.encode(TEXT, add_special_tokens=False).ids
    length = min(PIECE, positions or PIECE) - len(first)
    pieces = [first + tokens[at : at + length] for at in range(0, len(tokens), length)]
    return [torch.tensor([piece]) for piece in pieces if len(piece) > 1]


def perplexity(logits: Iterable[Floats], pieces: list[torch.Tensor], known: torch.Tensor) -> float:
    """exp of the mean of -log p of each token but a piece's first; `logits` are float32 [S, V] of each int64 [1, S], and tokens
    that are not `known`, bool [V], are left out."""
    losses = []
    for piece, floats in zip(pieces, logits, strict=True):
        rows = torch.from_numpy(floats)[:-1]
        sought = piece[0, 1:]
        losses.append(torch.nn.functional.cross_entropy(rows, sought, reduction="none")[known[sought]])
    mean = float(torch.cat(losses).double().mean())
    return math.exp(min(mean, 700.0))  # NaN stays NaN; a wrong model is no reason for an overflow


def _unchecked(error: Exception) -> ParityError:
    return ParityError(
        f"the exported graph does not run on ONNX Runtime: {first_line(error)}", "try another --precision, or report the model"
    )


def _in_fp32(path: Path) -> Path:
    """A copy of a bf16 graph beside it that computes in fp32 from the same bf16 weights, left in their own file.

    ONNX Runtime's CPU provider has no bf16 kernels but `Cast`.
    """
    model = ir.load(path)
    first = model.graph[0]
    for node in list(model.graph.all_nodes()):
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.INT and name in ("to", "dtype") and attribute.as_int() == BF16:
                node.attributes[name] = ir.AttrInt64(name, int(FP32))
            elif attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == BF16:
                constant = attribute.as_tensor().numpy().astype(np.float32)
                node.attributes[name] = ir.AttrTensor(name, ir.tensor(constant))
    for value in [*model.graph.inputs, *(output for node in model.graph.all_nodes() for output in node.outputs)]:
        if value.dtype == BF16:
            value.dtype = FP32
    for weight in list(model.graph.initializers.values()):
        if weight.dtype == BF16:
            cast = ir.node("Cast", [weight], {"to": int(FP32)})
            (cast.outputs[0].dtype, cast.outputs[0].shape) = (FP32, weight.shape)
            weight.replace_all_uses_with(cast.outputs[0])
            cast.replace_input_with(0, weight)
            model.graph.insert_before(first, cast)
    copy = path.with_name("parity.onnx")
    ir.save(model, copy)
    return copy


def compare(want: Floats, got: Floats, precision: str) -> Parity:
    """The figures for the manifest; rows are [S, V].

    Raises:
        ParityError: a logit is further off than the tolerance, or is no number. (So where a row's best token differs,
            the checkpoint's own logits of the two are within twice the tolerance.)
    """
    tolerance = TOLERANCE[precision] * max(1.0, float(np.abs(want).max()))
    difference = float(np.abs(want - got).max())
    if not difference <= tolerance:  # a NaN fails too
        raise ParityError(
            f"the exported graph is not the checkpoint: logits differ by up to {difference:.3g}, allowed are {tolerance:.3g}",
            "check the checkpoint for NaN and overflow (try --precision fp32); else please report the architecture",
        )
    return Parity(
        rows=len(want),
        max_abs_diff=difference,
        tolerance=tolerance,
        argmax_agreement=float((want.argmax(-1) == got.argmax(-1)).mean()),
    )


def check_perplexity(parity: Parity, found: float, reference: float, rounding: Rounding) -> Parity:
    """`parity` with the two figures.

    Raises:
        ParityError: the quantized model is no longer the checkpoint.
    """
    allowed = reference * COLLAPSE["int4" if "int4" in (rounding.precision, rounding.head_precision) else "int8"]
    if not found <= allowed:  # a NaN fails too
        raise ParityError(
            f"the weights do not bear {rounding.precision}: perplexity {found:.4g} on held-out text, where fp32 has"
            f" {reference:.4g} and {allowed:.4g} is allowed",
            "export with --head-precision fp32, --method auto-round, or --precision int8; else with fp32, fp16 or bf16",
        )
    return msgspec.structs.replace(parity, perplexity=found, reference_perplexity=reference)
