"""Trace any transformers decoder as a step model: one standard ONNX graph with the cache as plain inputs and outputs.

Two public hooks of transformers are enough, so no architecture is reimplemented: a registered attention function with its mask
function, and a `Cache` with our layers. The rest of the model is traced unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

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
    cache_tensors,
)
from outrider.errors import UnsupportedModelError
from outrider.export.checkpoints.checkpoint import learned_positions
from outrider.export.graph import experts, recurrence_functions
from outrider.export.graph.attention import ATTENTION, AttentionPass, attention_pass
from outrider.export.graph.cache_layers import CacheLayout, EmptyLayer, StepLayer, scatter
from outrider.export.graph.features import entering, feature_mixer
from outrider.export.graph.recurrent_layers import AttentionAndRecurrentStep, RecurrentStep
from outrider.export.graph.repeated_layers import layers_once
from outrider.export.graph.replaced import replaced
from outrider.export.graph.tracing import to_onnx


class StepModel(nn.Module):
    """The module to trace. Its inputs and outputs are in `engines.contract`."""

    def __init__(self, model: PreTrainedModel, layout: CacheLayout, vocab_rows: int, spare_row: bool):
        super().__init__()
        self.model = model
        self.layout = layout
        self.spare_row = spare_row
        embedded = int(model.get_input_embeddings().weight.shape[0])
        # A draft's embedding may lack the target's padding rows. Wrong results for such a token only cost acceptance.
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
        with _layers(past[:count], positions, key_positions, rows, self.spare_row) as (layers, attention):
            recurrent = self._recurrent(past[count:], commits[0], commits[1], rows) if commits else []
            cache = Cache(layers=self._in_order(layers, recurrent))
            ids = [] if mixer is None else mixer.ids
            once = layers_once(self.model, cache.layers, attention)
            with entering(self.model, ids) as hidden, replaced(self.model), once:
                # A backend may run a row after the last position and drop the result.
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
        """Return the caches of the recurrent layers. `_in_order` adds the attention of layers that also have some."""
        made, given = [], iter(past)
        with_attention = [has_attention for has_attention, is_recurrent in self.layout.kinds if is_recurrent]
        for sizes, has_attention in zip(self.layout.recurrent, with_attention, strict=True):
            tensors = [next(given) for _ in cache_tensors([], None, [sizes])]
            kind = AttentionAndRecurrentStep if has_attention else RecurrentStep
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
    """The module to trace for a draft head."""

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
        with _layers(past, positions, key_positions, rows, self.spare_row) as (layers, _):
            logits, output, *state = self.model(input_ids, features, rows, Cache(layers=layers))
        written = scatter(all_features, output[:, None, -1:], feature_positions)
        return logits.float(), *(tensor for layer in layers for tensor in (layer.keys, layer.values)), written, *state


@contextmanager
def _layers(
    past: Sequence[torch.Tensor], positions: torch.Tensor, key_positions: torch.Tensor, rows: torch.Tensor, spare_row: bool
) -> Iterator[tuple[list[StepLayer], AttentionPass]]:
    """Provide the layers of a model's cache and its attention for one pass, and check that attention used each layer."""
    layers = [StepLayer(key, value, positions, key_positions) for key, value in zip(past[::2], past[1::2], strict=False)]
    with attention_pass(rows, key_positions, spare_row) as attention:
        yield layers, attention
    # Layers without their own keys may attend to another layer's (Gemma-3n, Gemma-4).
    if attention.calls < len(layers) or not all(layer.updated for layer in layers):
        raise UnsupportedModelError("the model has its own attention code, outside transformers' attention interface")


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
        vocab_rows: any token below this number may be an input, even one that the model lacks.
        spare_row: compute the last row of attention twice, so that attention never has a single row. On ONNX Runtime's CPU
            provider, attention over a single row differs in the last bits from attention over several. With quantized weights,
            products round their inputs to int8, which turns such a difference into a whole rounding step. The products
            themselves give a row the same bits whatever the number of rows.
        features: the width of the features that the model writes or reads; None if it has none.
        is_head: whether the model is a draft head.

    Raises:
        UnsupportedModelError: the model does something that the graph cannot express.
    """
    # All sizes differ, and none is 0 or 1, because torch.export would treat these as constants.
    batch, rows, window, capacity, recent = 2, 3, 8, 16, 11
    caches = layout.tensors(features)
    extra = [FEATURE_POSITIONS] if is_head else [PENDING, COMMITTED] if layout.recurrent else []
    past = tuple(
        torch.zeros(batch, *c.sizes(capacity, recent), dtype=model.dtype if c.dtype is None else torch.float32) for c in caches
    )
    one = torch.zeros(batch, dtype=torch.int64)
    inputs = (torch.zeros(batch, rows, dtype=torch.int64), one, torch.arange(window), *(one.clone() for _ in extra), *past)
    of_batch = {0: BATCH_DIM}
    of_caches = [of_batch | {at: size for at, size in enumerate(c.shape, 1) if isinstance(size, str)} for c in caches]
    # The shapes of the tensors in `*past` are nested. Only a draft head's `forward` names the extra input.
    of_extra = [of_batch] * len(extra)
    nested = (of_extra[0], (*of_caches,)) if is_head else ((*of_extra, *of_caches),)
    shapes = ({0: BATCH_DIM, 1: ROWS_DIM}, of_batch, {0: WINDOW_DIM}, *nested)
    step = HeadStep(model, spare_row) if is_head else StepModel(model, layout, vocab_rows, spare_row)
    state = [] if getattr(model, "block_state", None) is None else [BLOCK_STATE]
    model.set_attn_implementation(ATTENTION)
    program = to_onnx(
        step,
        inputs,
        shapes,
        [INPUT_IDS, POSITIONS, KEY_POSITIONS, *extra, *(c.past for c in caches)],
        [LOGITS, *(c.present for c in caches), *state],
        type(model).__name__,
    )
    for name in {node.op_type for node in program.model.graph.all_nodes() if node.domain == DOMAIN}:
        program.model.opset_imports[DOMAIN] = 1
        defined = experts.functions(name) if name in EXPERTS.values() else recurrence_functions.functions(name)
        program.model.functions.update({function.identifier(): function for function in defined})
    return program
