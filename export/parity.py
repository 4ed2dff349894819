"""Check that an exported graph reproduces the checkpoint's logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from outrider.backends.onnxruntime.engine import ACCURACY, CPU
from outrider.backends.onnxruntime.fusion.products import with_block_products
from outrider.backends.onnxruntime.package import first_line
from outrider.backends.onnxruntime.pool import session_options
from outrider.bundle.manifest import WEIGHTS, Parity
from outrider.engines.arrays import Floats
from outrider.engines.contract import (
    COMMITTED,
    FEATURE_POSITIONS,
    INPUT_IDS,
    KEY_POSITIONS,
    PAST_FEATURES,
    PENDING,
    POSITIONS,
    recent_rows,
)
from outrider.engines.precisions import PRECISIONS
from outrider.errors import OutriderError, ParityError, SourceError, UnsupportedModelError
from outrider.export.graph.cache_layers import CacheLayout
from outrider.export.graph.features import entering, feature_mixer
from outrider.export.graph.recurrent_layers import has_attention, is_empty, is_recurrent, recurrent_sizes
from outrider.progress import SILENT, Progress

CHUNKS = (7, 1, 5, 2, 9)  # rows per run, as in prefill, decoding and verification
CAPACITY = 32
BF16, FP32 = ir.DataType.BFLOAT16, ir.DataType.FLOAT


def sample_tokens(vocab_tokens: int) -> torch.Tensor:
    """Return tokens int64 [1, S] from the whole vocabulary, always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocab_tokens, (1, sum(CHUNKS)), generator=generator)


class Reference(NamedTuple):
    """The results of a checkpoint in one pass with eager attention."""

    logits: Floats  # float32 [S, V]
    layout: CacheLayout  # of the checkpoint's cache
    features: Floats | None  # float32 [S, H] of a target with a draft head; for the next draft step, [1, H], of a draft head


def sample_features(width: int) -> torch.Tensor:
    """Return features float32 [1, S, width] for the tokens of `sample_tokens`, always the same."""
    return torch.randn((1, sum(CHUNKS), width), generator=torch.Generator().manual_seed(1))


def reference(model: PreTrainedModel, tokens: torch.Tensor, features: torch.Tensor | None = None) -> Reference:
    """Run a checkpoint.

    Args:
        model: the checkpoint.
        tokens: int64 [1, S].
        features: float32 [1, S, H], if the model is a draft head.

    Raises:
        SourceError: the model does not run.
        UnsupportedModelError: the model keeps a state that a graph cannot keep.
    """
    if features is not None:
        cache: Any = DynamicCache()
        logits, made, *_ = _run(model, tokens, features.to(model.dtype), torch.arange(tokens.shape[1])[None], cache)
        return Reference(logits[0].float().numpy(), cache_layout(model, cache), made[0, -1:].float().numpy())
    mixer = feature_mixer(model)
    with entering(model, [] if mixer is None else mixer.ids) as hidden:
        output = _run(model, tokens, use_cache=True)
    cache = getattr(output, "past_key_values", None) or getattr(output, "cache_params", None)
    cache = getattr(cache, "self_attention_cache", cache)  # of a decoder that can have an encoder
    if cache is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no key/value cache")
    mixed = None if mixer is None else _run(mixer, hidden)[0].float().numpy()
    return Reference(output.logits[0].float().numpy(), cache_layout(model, cache), mixed)


class _FirstOfEqual(TorchFunctionMode):
    """Lets `topk` take the first of equal values, as ONNX does. torch takes any of them: a router with a tie, any expert."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.topk, torch.Tensor.topk):
            return _topk(*args, **kwargs or {})
        return function(*args, **kwargs or {})


def _topk(input: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    values, indices = input.sort(dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


def _run(model: nn.Module, *arguments: Any, **options: Any) -> Any:
    try:
        with torch.no_grad(), _FirstOfEqual():
            return model(*arguments, **options)
    except (MemoryError, OutriderError):
        raise
    except Exception as error:  # models raise errors of any type if their configuration contradicts itself
        raise SourceError(
            f"{type(model).__name__} does not run: {first_line(error)[:300]}",
            "check the sizes in the checkpoint's config.json, such as the rotary embedding's, or download the checkpoint again",
        ) from error


def texts_logits(model: PreTrainedModel, texts: list[torch.Tensor]) -> list[Floats]:
    """Return the logits of several texts, float32 [S, V] of each int64 [1, S], from one pass over all of them.

    They are filled up at their ends, where nothing before can see it.

    Raises:
        SourceError, UnsupportedModelError: see `reference`.
    """
    together = torch.nn.utils.rnn.pad_sequence([text[0] for text in texts], batch_first=True)
    logits = _run(model, together).logits
    return [rows[: text.shape[1]].float().numpy() for rows, text in zip(logits, texts, strict=True)]


def cache_layout(model: PreTrainedModel, cache: Any) -> CacheLayout:
    """Return what the layers of a model's cache keep. The cache must be from a run.

    Raises:
        UnsupportedModelError: the cache keeps something other than keys, values and known recurrent states.
    """
    if not hasattr(cache, "layers"):
        raise UnsupportedModelError(f"{type(model).__name__} keeps its own kind of cache, {type(cache).__name__}")
    if kinds := {
        type(each).__name__ for each in cache.layers if not (has_attention(each) or is_recurrent(each) or is_empty(each))
    }:
        raise UnsupportedModelError(f"{type(model).__name__} keeps something else in its cache: {', '.join(sorted(kinds))}")
    attention = [layer for layer in cache.layers if has_attention(layer)]
    if not attention:
        raise UnsupportedModelError(f"{type(model).__name__} has no layer with attention")
    layers = [(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) for layer in attention]
    recurrent = recurrent_sizes(model, cache.layers)
    return CacheLayout(layers, recurrent, [(has_attention(layer), is_recurrent(layer)) for layer in cache.layers])


def open_graph(path: Path, precision: str, as_served: bool = False) -> Any:
    """Open a graph in ONNX Runtime; see `Exported` for `as_served`.

    Raises:
        ParityError: ONNX Runtime cannot load it.
    """
    options = session_options()
    options.log_severity_level = 3  # errors only: ONNX Runtime warns that it copies the cache, which is intended here
    if not as_served:
        if precision not in ("int8", "int4"):  # it copies the weights, where products need no other form of them
            options.add_session_config_entry("session.disable_prepacking", "1")
        options.add_session_config_entry(ACCURACY, "1")
    graph = path
    if as_served:
        graph = path.with_name("served.onnx")
        with_block_products(path, graph)
    if precision == "bf16":
        graph = _in_fp32(path)
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # folding copies the weights too
    try:
        return onnxruntime.InferenceSession(str(graph), options, providers=[CPU])
    except Exception as error:  # ONNX Runtime's errors share no base class
        raise _does_not_run(error) from error
    finally:
        if graph != path:
            graph.unlink()
            graph.with_name(graph.name + WEIGHTS).unlink(missing_ok=True)  # they are in memory or mapped


class Exported:
    """A graph run by ONNX Runtime."""

    def __init__(self, path: Path, layout: CacheLayout, precision: str, as_served: bool = False, features: int | None = None):
        """Load the graph of a model with features of the width `features`, or without any.

        In serving, ONNX Runtime also rounds activations before it multiplies them by quantized weights. Here it only does so
        with `as_served`.

        Raises:
            ParityError: ONNX Runtime cannot load the graph.
        """
        self.session = open_graph(path, precision, as_served)
        self._caches, self._layout = layout.tensors(features), layout
        self._dtype = np.float16 if precision == "fp16" else np.float32

    def logits(self, tokens: torch.Tensor, chunks: Sequence[int] = CHUNKS) -> Floats:
        """Return the logits of `results`."""
        return self.results(tokens, chunks)[0]

    def texts_logits(self, texts: Sequence[torch.Tensor], progress: Progress = SILENT) -> Iterator[Floats]:
        """Yield the logits of several texts, float32 [S, V] of each int64 [1, S]. Progress advances by 1 for each."""
        return (self.results(text, [text.shape[1]], progress=progress)[0] for text in texts)

    def results(
        self,
        tokens: torch.Tensor,
        chunks: Sequence[int] = CHUNKS,
        features: torch.Tensor | None = None,
        progress: Progress = SILENT,
    ) -> tuple[Floats, Floats | None]:
        """Return logits, float32 [S, V], and the features that the model has written, as in `Reference`.

        Args:
            tokens: int64 [1, S].
            chunks: the rows of each run.
            features: float32 [1, S, H], the input of a draft head.
            progress: advances by 1 for each run.

        Raises:
            ParityError: a run failed.
        """
        capacity = max(CAPACITY, tokens.shape[1])
        recent = recent_rows(self._layout.recurrent, 1)
        past = {c.past: np.zeros((1, *c.sizes(capacity, recent)), dtype=c.dtype or self._dtype) for c in self._caches}
        extra: dict[str, npt.NDArray[Any]] = {}
        if features is not None:
            past[PAST_FEATURES][:, 0, : features.shape[1]] = features.numpy()
            extra = {FEATURE_POSITIONS: np.array([capacity - 1])}
        logits, start = [], 0
        for rows in chunks:
            inputs = {
                INPUT_IDS: tokens[:, start : start + rows].numpy(),
                POSITIONS: np.array([start]),
                KEY_POSITIONS: np.arange(start + rows),
            }
            if self._layout.recurrent:
                extra = {PENDING: np.array([0]), COMMITTED: np.array([rows])}
            try:
                output, *present = self.session.run(None, inputs | extra | past)
            except Exception as error:
                raise _does_not_run(error) from error
            past = {c.past: array for c, array in zip(self._caches, present, strict=False)}  # a block head has one more output
            logits.append(output[0])
            start += rows
            progress.advance(1)
        written = past.get(PAST_FEATURES)
        if written is not None:
            written = written[0, 0, :start] if features is None else written[0, 0, -1:]
        return np.concatenate(logits), None if written is None else written.astype(np.float32)


def _does_not_run(error: Exception) -> ParityError:
    return ParityError(
        f"the exported graph does not run on ONNX Runtime: {first_line(error)}",
        "try another --precision, or report a bug with the name of the model",
    )


def _in_fp32(path: Path) -> Path:
    """Write a copy of a bf16 graph that computes in fp32. It shares the original's file of bf16 weights.

    ONNX Runtime's CPU provider has no bf16 kernels except `Cast`.
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


def compare(expected: Floats, actual: Floats, precision: str, what: str = "logits") -> Parity:
    """Compare logits, float32 [S, V], or features, and return the figures for the manifest.

    If the most likely token of a row differs, the checkpoint's logits of the two tokens differ by at most twice the tolerance.

    Raises:
        ParityError: a value differs by more than the tolerance, or is NaN.
    """
    tolerance = PRECISIONS[precision].parity * max(1.0, float(np.abs(expected).max()))
    difference = float(np.abs(expected - actual).max())
    if not difference <= tolerance:  # also true for NaN
        raise ParityError(
            f"the exported graph does not match the checkpoint: {what} differ by up to {difference:.3g}, and only"
            f" {tolerance:.3g} is allowed",
            "check the checkpoint for NaN and overflow (try --precision fp32), or report a bug with the name of the model",
        )
    return Parity(
        rows=len(expected),
        max_abs_diff=difference,
        tolerance=tolerance,
        argmax_agreement=float((expected.argmax(-1) == actual.argmax(-1)).mean()),
    )
