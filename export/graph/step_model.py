"""Trace any transformers decoder as a step model: one standard ONNX graph with the cache as plain inputs and outputs.

Two public hooks of transformers are enough, so no architecture is reimplemented: a registered attention function with its mask
function, and a `Cache` of our own layers. The rest of the model is traced as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.onnx.ops import symbolic
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface

from outrider.engines.contract import (
    BATCH_DIM,
    BLOCK_STATE,
    COMMITTED,
    DOMAIN,
    EXPERTS,
    FEATURE_POSITIONS,
    INPUT_IDS,
    KEY_POSITIONS,
    LOGITS,
    PENDING,
    POSITIONS,
    ROWS_DIM,
    WINDOW_DIM,
    CacheTensor,
    RecurrentLayer,
    cache_tensors,
)
from outrider.errors import UnsupportedModelError
from outrider.export.checkpoints.checkpoint import learned_positions
from outrider.export.graph import experts, recurrence
from outrider.export.graph.recurrent import AttentionAndRecurrentStep, RecurrentStep
from outrider.export.graph.replaced import replaced
from outrider.export.graph.tracing import OPSET, to_onnx

ATTENTION = "outrider_step"
FEATURE_MIXER = "feature_mixer"  # a submodule that a target gets for a draft head


@dataclass(slots=True)
class _Trace:
    """What our hooks need beyond the arguments that transformers passes to them."""

    rows: torch.Tensor  # int64 [B, S], the absolute index of each row
    keys: torch.Tensor  # int64 [L], the absolute index of each key
    spare_row: bool = False  # attention computes its last row twice
    attention_calls: int = 0  # of step_attention


_current: ContextVar[_Trace] = ContextVar("_current")


def step_mask(mask_function: Callable[..., torch.Tensor], **_: Any) -> torch.Tensor:
    """Return the mask, bool [B, 1, S, L]: the model's own rule (causal, sliding, chunked) at absolute positions."""
    trace = _current.get()
    batch = torch.arange(trace.rows.shape[0])[:, None, None, None]
    head = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    return mask_function(batch, head, trace.rows[:, None, :, None], trace.keys[None, None, None, :])


def step_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Emit one ONNX `Attention` node: query [B, H, S, D], key and value [B, Hkv, L, D] -> [B, S, H, D]."""
    if attention_mask is None or attention_mask.dtype != torch.bool:
        raise UnsupportedModelError(f"{type(module).__name__} uses attention without a causal mask")
    trace = _current.get()
    trace.attention_calls += 1
    if options.get("position_bias") is not None:
        raise UnsupportedModelError(f"{type(module).__name__} uses `position_bias`, which ONNX Attention cannot express")
    sinks: torch.Tensor | None = options.get("s_aux")
    scale = float(scaling) if scaling is not None else query.shape[-1] ** -0.5
    rows = query.shape[2]
    if trace.spare_row:
        query = torch.cat([query, query[:, :, -1:]], 2)
        attention_mask = torch.cat([attention_mask, attention_mask[:, :, -1:]], 2)
    if softcap is None and sinks is None:
        shape = (*query.shape[:-1], value.shape[-1])
        inputs = (query, key, value, attention_mask)
        output = symbolic("Attention", inputs, {"scale": scale}, dtype=query.dtype, shape=shape, version=OPSET)
    else:
        output = _written_out(query, key, value, attention_mask, scale, softcap, sinks)
    if trace.spare_row:
        output = output[:, :, :rows]
    return output.transpose(1, 2).contiguous(), None  # as transformers' own functions return it


def _written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention in plain ops, for what ONNX's or TensorRT's `Attention` lacks.

    Query heads are grouped by their key/value head, so that keys and values are not repeated in memory.

    Args:
        softcap: scores become `softcap * tanh(scores / softcap)`.
        sinks: [H], a further score of each head, which takes its share of the weights and has no value (GPT-OSS).
    """
    batch, heads, rows, width = query.shape
    groups = heads // key.shape[1]
    grouped = query.contiguous().reshape(batch, key.shape[1], groups * rows, width)
    scores = (grouped @ key.transpose(2, 3)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.reshape(batch, heads, rows, key.shape[2])
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is None:
        weights = scores.softmax(-1, dtype=torch.float32)
    else:
        sink = sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(batch, -1, rows, 1)
        weights = torch.cat([scores, sink], -1).softmax(-1, dtype=torch.float32)[..., :-1]
    weights = weights.to(query.dtype).reshape(batch, key.shape[1], groups * rows, key.shape[2])
    return (weights @ value).reshape(batch, heads, rows, value.shape[-1])


AttentionInterface.register(ATTENTION, step_attention)
AttentionMaskInterface.register(ATTENTION, step_mask)


def scatter(past: torch.Tensor, update: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Emit one `TensorScatter`: write rows [B, H, S, D] into `past` [B, H, C, D], from index `positions` [B] on."""
    inputs = (past, update.contiguous(), positions)
    return symbolic("TensorScatter", inputs, {"axis": -2}, dtype=past.dtype, shape=past.shape, version=OPSET)


class HeldLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """The cache of one layer, which transformers neither allocates nor measures."""

    is_sliding = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the tensors are there."""

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0  # unused: our masks know which rows they are for


class EmptyLayer(HeldLayer):
    """The cache of a layer that keeps nothing."""

    def update(self, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        raise UnsupportedModelError("a layer without attention attends")


class StepLayer(HeldLayer):
    """The cache of one layer. It is written by `TensorScatter`, and read through a window as long as `key_positions`."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor, key_positions: torch.Tensor):
        super().__init__()
        self.keys, self.values = key, value
        self.positions, self.key_positions = positions, key_positions
        self.updated = False
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.updated:
            raise UnsupportedModelError("two attention layers write to one cache layer")
        self.updated = True
        self.keys = scatter(self.keys, key_states, self.positions)
        self.values = scatter(self.values, value_states, self.positions)
        return self._window(self.keys), self._window(self.values)

    def _window(self, present: torch.Tensor) -> torch.Tensor:
        # For a torch slice, torch.export would have to prove that the window fits the capacity.
        end = symbolic("Shape", (self.key_positions,), dtype=torch.int64, shape=(1,), version=OPSET)
        inputs = (present, torch.tensor([0]), end, torch.tensor([2]))
        shape = (*present.shape[:2], self.key_positions.shape[0], present.shape[3])
        return symbolic("Slice", inputs, dtype=present.dtype, shape=shape, version=OPSET)


class CacheLayout(NamedTuple):
    """What the layers of a model's cache keep."""

    layers: list[tuple[int, int, int]]  # (key/value heads, key width, value width) of each with attention
    recurrent: Sequence[RecurrentLayer] = ()
    kinds: Sequence[tuple[bool, bool]] = ()  # whether each has attention, and is recurrent; () if all have attention

    def tensors(self, features: int | None = None) -> list[CacheTensor]:
        """Return the cache tensors, with features of the width `features`, if there are any."""
        return cache_tensors(self.layers, features, self.recurrent)


class StepModel(nn.Module):
    """The module that is traced, from the inputs in `engines.contract` to `logits` and the present caches."""

    def __init__(self, model: PreTrainedModel, layout: CacheLayout, vocab_rows: int, spare_row: bool):
        super().__init__()
        self.model = model
        self.layout = layout
        self.spare_row = spare_row
        embedded = int(model.get_input_embeddings().weight.shape[0])
        # A draft may lack rows of the target's padding; what it makes of such a token costs acceptance and nothing else.
        self.last_token = embedded - 1 if embedded < vocab_rows else None
        self.places = learned_positions(model)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, key_positions: torch.Tensor, *past: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        commits, past = (past[:2], past[2:]) if self.layout.recurrent else ((), past)
        rows = positions[:, None] + torch.arange(input_ids.shape[1])
        if self.last_token is not None:
            input_ids = input_ids.clamp(max=self.last_token)
        mixer = feature_mixer(self.model)
        count = 2 * len(self.layout.layers)
        with _layers(past[:count], positions, key_positions, rows, self.spare_row) as layers:
            recurrent = self._recurrent(past[count:], commits[0], commits[1], rows) if commits else []
            cache = Cache(layers=self._in_order(layers, recurrent))
            with entering(self.model, [] if mixer is None else mixer.ids) as hidden, replaced(self.model):
                # A backend may run a row behind the last position, and drop the result.
                places = rows if self.places is None else (rows + self.places[0]).clamp(max=self.places[-1])
                output = self.model(input_ids=input_ids, position_ids=places, past_key_values=cache, use_cache=True)
            features = [] if mixer is None else [scatter(past[-1], mixer(hidden)[:, None], positions)]
        if not all(each.complete for each in recurrent):
            raise UnsupportedModelError("a recurrent layer was not run")
        kept = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
        return output.logits.float(), *kept, *(tensor for each in recurrent for tensor in each.tensors), *features

    def _recurrent(
        self, past: Sequence[torch.Tensor], pending: torch.Tensor, committed: torch.Tensor, places: torch.Tensor
    ) -> list[RecurrentStep]:
        """Return what each recurrent layer keeps. Those with attention beside it get that in `_in_order`."""
        made, given = [], iter(past)
        kinds = iter([kind for kind in self.layout.kinds if kind[1]])
        for sizes in self.layout.recurrent:
            tensors = [next(given) for _ in cache_tensors([], None, [sizes])]
            kind = AttentionAndRecurrentStep if next(kinds)[0] else RecurrentStep
            made.append(kind(sizes, tensors, pending, committed, places, past[0]))
        return made

    def _in_order(self, layers: list[StepLayer], recurrent: list[RecurrentStep]) -> list[Any]:
        """Return the layers of the cache in the model's order."""
        attention, state = iter(layers), iter(recurrent)
        ordered: list[Any] = []
        for has_attention, is_recurrent in self.layout.kinds or [(True, False)] * len(layers):
            ordered.append(next(state) if is_recurrent else next(attention) if has_attention else EmptyLayer())
            if has_attention and is_recurrent:
                ordered[-1].attention = next(attention)
        return ordered


class HeadStep(nn.Module):
    """The module that is traced of a draft head."""

    def __init__(self, model: PreTrainedModel, spare_row: bool):
        super().__init__()
        self.model = model
        self.spare_row = spare_row

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        key_positions: torch.Tensor,
        feature_positions: torch.Tensor,
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        rows = positions[:, None] + torch.arange(input_ids.shape[1])
        all_features = past[-1]
        features = all_features[:, 0].gather(1, rows[..., None].expand(-1, -1, all_features.shape[-1]))
        with _layers(past, positions, key_positions, rows, self.spare_row) as layers:
            logits, output, *state = self.model(input_ids, features, rows, Cache(layers=layers))
        written = scatter(all_features, output[:, None, -1:], feature_positions)
        return logits.float(), *(tensor for layer in layers for tensor in (layer.keys, layer.values)), written, *state


@contextmanager
def _layers(
    past: Sequence[torch.Tensor], positions: torch.Tensor, key_positions: torch.Tensor, rows: torch.Tensor, spare_row: bool
) -> Iterator[list[StepLayer]]:
    """Give a model the layers of its cache for one pass, in which each must be written and attended to once."""
    layers = [StepLayer(key, value, positions, key_positions) for key, value in zip(past[::2], past[1::2], strict=False)]
    trace = _Trace(rows, key_positions, spare_row)
    token = _current.set(trace)
    try:
        yield layers
    finally:
        _current.reset(token)
    # Layers without keys of their own may attend to those of another (Gemma-3n, Gemma-4).
    if trace.attention_calls < len(layers) or not all(layer.updated for layer in layers):
        raise UnsupportedModelError("the model has its own attention code, outside transformers' attention interface")


def feature_mixer(model: nn.Module) -> Any:
    """Return the submodule of a target that makes the features for a draft head, or None."""
    return getattr(model, FEATURE_MIXER, None)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the layers of a model's decoder.

    Raises:
        UnsupportedModelError: it has no list of them.
    """
    count = model.config.get_text_config().num_hidden_layers
    decoder = model.get_decoder() or model  # a vision tower may have as many layers
    lists = (each for each in decoder.modules() if isinstance(each, nn.ModuleList) and len(each) == count)
    layers = next(lists, None)
    if layers is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no list of {count} layers that a draft head could read")
    return layers


@contextmanager
def entering(model: PreTrainedModel, ids: Sequence[int]) -> Iterator[list[torch.Tensor]]:
    """Collect what enters the decoder layers `ids` in a pass, in that order; the number of layers is the last one's output.

    Raises:
        UnsupportedModelError: the model has no list of its layers.
    """
    found: list[torch.Tensor] = []
    if not ids:
        yield found
        return
    layers = decoder_layers(model)
    count = len(layers)
    hidden: dict[int, torch.Tensor] = {}

    def entered(index: int) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[torch.Tensor, ...], options: dict[str, torch.Tensor]) -> None:
            hidden[index] = inputs[0] if inputs else options["hidden_states"]

        return hook

    def left(_: nn.Module, inputs: Any, output: Any) -> None:
        hidden[count] = output if isinstance(output, torch.Tensor) else output[0]

    hooks = [layers[index].register_forward_pre_hook(entered(index), with_kwargs=True) for index in {*ids} - {count}]
    if count in ids:
        hooks.append(layers[-1].register_forward_hook(left))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
    found += [hidden[index] for index in ids]


def trace(
    model: PreTrainedModel,
    layout: CacheLayout,
    vocab_rows: int = 0,
    spare_row: bool = False,
    features: int | None = None,
    is_head: bool = False,
) -> torch.onnx.ONNXProgram:
    """Trace `model` as an ONNX program with dynamic batch, rows, window and capacity. Weights are referenced, not copied.

    Args:
        model: the model to trace.
        layout: what the layers of its cache keep.
        vocab_rows: any token below it may be an input, whether or not the model has it.
        spare_row: compute the last row of attention twice, so that attention never has a single row. On ONNX Runtime's CPU
            provider, attention of a single row differs in the last bits from that of several. With quantized weights, products
            round their inputs to int8, which turns such a difference into a whole rounding step. The products themselves give
            a row the same bits whatever the number of rows.
        features: width of the features that the model writes or reads; None if it has none.
        is_head: whether the model is a draft head.

    Raises:
        UnsupportedModelError: the model does something that the graph cannot express.
    """
    # The sizes differ, and none is 0 or 1, because torch.export would take these for constants.
    batch, rows, window, capacity, recent = 2, 3, 8, 16, 11
    caches = layout.tensors(features)
    further = [FEATURE_POSITIONS] if is_head else [PENDING, COMMITTED] if layout.recurrent else []
    past = tuple(
        torch.zeros(batch, *c.sizes(capacity, recent), dtype=model.dtype if c.dtype is None else torch.float32) for c in caches
    )
    one = torch.zeros(batch, dtype=torch.int64)
    inputs = (torch.zeros(batch, rows, dtype=torch.int64), one, torch.arange(window), *(one.clone() for _ in further), *past)
    of_batch = {0: BATCH_DIM}
    of_caches = [of_batch | {at: size for at, size in enumerate(c.shape, 1) if isinstance(size, str)} for c in caches]
    # What `forward` takes as one variable number of tensors has shapes of its own.
    named = [of_batch] * len(further) if is_head else []
    shapes = (
        {0: BATCH_DIM, 1: ROWS_DIM},
        of_batch,
        {0: WINDOW_DIM},
        *named,
        (*([] if is_head else [of_batch] * len(further)), *of_caches),
    )
    step = HeadStep(model, spare_row) if is_head else StepModel(model, layout, vocab_rows, spare_row)
    state = [] if getattr(model, "block_state", None) is None else [BLOCK_STATE]
    model.set_attn_implementation(ATTENTION)
    program = to_onnx(
        step,
        inputs,
        shapes,
        [INPUT_IDS, POSITIONS, KEY_POSITIONS, *further, *(c.past for c in caches)],
        [LOGITS, *(c.present for c in caches), *state],
        type(model).__name__,
    )
    for name in {node.op_type for node in program.model.graph.all_nodes() if node.domain == DOMAIN}:
        program.model.opset_imports[DOMAIN] = 1
        defined = experts.functions(name) if name in EXPERTS.values() else recurrence.functions(name)
        program.model.functions.update({function.identifier(): function for function in defined})
    return program
