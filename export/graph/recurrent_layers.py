"""Trace transformers' recurrent layers, with the convolutions and recurrences that `engines.contract` describes.

As with attention, no architecture is reimplemented. transformers' recurrent layers call a few functions of their modules, which
are replaced during a trace. The convolution becomes a sum that gives a row the same bits whatever the number of rows. The
recurrence becomes a call of a function of the graph; `export/graph/recurrence_functions.py` has its body.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn import functional as F
from torch.onnx.ops import symbolic_multi_out
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from outrider.engines.contract import DOMAIN, GATED, GATED_DELTA, RecurrentLayer
from outrider.errors import OutriderError, UnsupportedModelError
from outrider.export.checkpoints.source import reason_of
from outrider.export.graph.cache_layers import HeldLayer, StepLayer
from outrider.export.graph.replaced import FUNCTIONS, replaced

_current: ContextVar[Any] = ContextVar("_current")  # the layer whose convolution ran last


def is_recurrent(layer: object) -> bool:
    """Return whether a layer of a cache keeps a recurrent state."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def is_empty(layer: object) -> bool:
    """Return whether a layer of a cache keeps nothing, because the model's layer mixes no rows or was not run."""
    return type(layer).__name__ == "DummyLayer" or (isinstance(layer, DynamicLayer) and layer.keys is None)


def has_attention(layer: object) -> bool:
    """Return whether a layer of a cache keeps keys and values in an order that a graph can keep too."""
    return isinstance(layer, DynamicLayer) and layer.keys is not None


class RecurrentStep(LinearAttentionCacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """The cache of one recurrent layer during one pass."""

    def __init__(
        self,
        sizes: RecurrentLayer,
        tensors: Sequence[torch.Tensor],
        pending: torch.Tensor,
        committed: torch.Tensor,
        places: torch.Tensor,
        any_rows: torch.Tensor,
    ):
        """Keep a layer's tensors.

        Args:
            sizes: the layer's sizes.
            tensors: the layer's tensors in the order of `contract.cache_tensors`.
            pending, committed: int64 [B].
            places: int64 [B, S], the positions of the rows; the same for all layers.
            any_rows: the rows that the first recurrent layer keeps, [B, R, _].
        """
        super().__init__()
        self.sizes, self.tensors = sizes, list(tensors)
        self.pending, self.committed, self.places, self.any_rows = pending, committed, places, any_rows
        self.is_initialized = True
        self.updated: set[str] = set()

    @property
    def held(self) -> list[torch.Tensor]:
        """What the layer keeps."""
        return self.tensors

    def hold(self, tensors: Sequence[torch.Tensor], like: Any) -> None:
        """Replace the kept tensors, and take over from the layer `like` which of them were updated."""
        self.tensors, self.updated = list(tensors), {*like.updated}

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Do nothing: the tensors exist already."""

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> torch.Tensor:
        """Keep the rows [B, F, S] that enter a convolution, and return them after the earlier rows that it reads."""
        if "conv" in self.updated or state_idx:
            raise UnsupportedModelError("a recurrent layer has several convolutions")
        self.updated.add("conv")
        past, rows, history = self.tensors[0], conv_states.transpose(1, 2), self.sizes.history
        recent, pending = past.shape[1], self.pending[:, None]
        joined = torch.cat([past, rows], 1)
        batch = torch.arange(past.shape[0])[:, None]
        before = joined[batch, pending + torch.arange(history)]
        kept = self.committed[:, None] + torch.arange(recent)
        kept = torch.where(kept < history + pending, kept, kept + recent - history - pending)
        # There is nothing to keep after the last row.
        self.tensors[0] = joined[batch, kept.clamp(max=joined.shape[1] - 1)]
        _current.set(self)
        return torch.cat([before, rows], 1).transpose(1, 2)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **_: Any) -> torch.Tensor:
        return recurrent_states  # the recurrence has kept it

    @property
    def complete(self) -> bool:
        """Whether all tensors of the layer were updated."""
        return self.updated == ({"conv", "state"} if self.sizes.row else {"conv"})

    def recur(self, rule: str, query: torch.Tensor, *row: torch.Tensor) -> torch.Tensor:
        """Emit a recurrence over rows.

        Args:
            rule: `GATED` or `GATED_DELTA`.
            query: float32 [B, S, Hk, Dk].
            row: the tensors that the layer keeps of each row:
                key, float32 [B, S, Hk, Dk]; consecutive heads of the state share a key and a query;
                value, float32 [B, S, Hs, Dv];
                decay, float32 [B, S, Hs], the logarithm of the state's factor;
                beta, float32 [B, S, Hs], the update rate, only of `GATED_DELTA`.

        Returns:
            float32 [B, S, Hs, Dv].
        """
        if "state" in self.updated:
            raise UnsupportedModelError("a recurrent layer has several recurrences")
        self.updated.add("state")
        (_, past_rows, past_state), (key, value, *_) = self.tensors, row
        shared = self.pending, self.committed, self.places, self.any_rows
        flat = [each.flatten(2) if each.dim() > 3 else each for each in row]
        inputs = (query.flatten(2), torch.cat(flat, -1), past_rows, past_state, *shared)
        shapes = [(*value.shape[:2], value.shape[2] * value.shape[3]), past_rows.shape, past_state.shape]
        attributes: dict[str, Any] = {"heads": value.shape[2], "key_heads": key.shape[2]}
        output, *self.tensors[1:] = symbolic_multi_out(
            f"{DOMAIN}::{rule}", inputs, attributes, dtypes=[torch.float32] * 3, shapes=shapes, version=1
        )
        return output.reshape(value.shape)


class AttentionAndRecurrentStep(RecurrentStep, HeldLayer):
    """The cache of a layer with both attention and a recurrence."""

    attention: StepLayer  # keeps the keys and values

    @property
    def held(self) -> list[torch.Tensor]:
        return [*self.tensors, *self.attention.held]

    def hold(self, tensors: Sequence[torch.Tensor], like: Any) -> None:
        super().hold(tensors[:-2], like)
        self.attention.hold(tensors[-2:], like.attention)

    def update(self, *args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.attention.update(*args, **options)


class _Probe(LinearAttentionLayer):  # type: ignore[misc]
    """Finds the sizes of a recurrent layer while the model runs."""

    def __init__(self) -> None:
        super().__init__()
        self.channels = self.history = 0
        self.state: RecurrentLayer | None = None

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **options: Any
    ) -> torch.Tensor:
        self.channels, self.history = conv_states.shape[1], (conv_kernel_size or 1) - 1
        _current.set(self)
        return F.pad(conv_states, (self.history, 0))

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **_: Any) -> torch.Tensor:
        return recurrent_states

    def recur(self, rule: str, query: torch.Tensor, *row: torch.Tensor) -> torch.Tensor:
        key, value, *_ = row
        sizes = value.shape[2], key.shape[3], value.shape[3]
        self.state = RecurrentLayer(self.channels, self.history, sum(each[0, 0].numel() for each in row), *sizes)
        return value


class _AttentionAndProbe(_Probe, DynamicLayer):  # type: ignore[misc]
    def __init__(self) -> None:
        DynamicLayer.__init__(self)
        _Probe.__init__(self)

    def lazy_initialization(self, *args: Any, **options: Any) -> None:
        DynamicLayer.lazy_initialization(self, *args, **options)


def recurrent_sizes(model: PreTrainedModel, kinds: Sequence[object]) -> list[RecurrentLayer]:
    """Return the sizes of a model's recurrent layers, in order.

    Args:
        model: the model.
        kinds: the layers of its cache after a run.

    Raises:
        UnsupportedModelError: a layer keeps a recurrent state of an unknown kind.
    """
    if not any(map(is_recurrent, kinds)):
        return []
    if any(len(getattr(each, "conv_states", [0])) > 1 for each in kinds):
        raise _unknown(model, ": several convolutions in one layer")
    layers = [
        (_AttentionAndProbe if has_attention(each) else _Probe)() if is_recurrent(each) else DynamicLayer() for each in kinds
    ]
    try:
        with torch.no_grad(), replaced(model):
            model(torch.zeros(1, 8, dtype=torch.int64), past_key_values=Cache(layers=layers), use_cache=True)
    except (MemoryError, OutriderError):
        raise
    except Exception as error:  # such as a recurrence before any convolution
        raise _unknown(model, f": {reason_of(error)}") from error
    sizes = []
    for before, layer in zip(kinds, layers, strict=True):
        if not isinstance(layer, _Probe):
            continue
        has_state = any(state is not None for state in getattr(before, "recurrent_states", {}).values())
        if not layer.channels or (layer.state is None and has_state):
            raise _unknown(model)
        sizes.append(layer.state or RecurrentLayer(layer.channels, layer.history))
    return sizes


def _unknown(model: PreTrainedModel, what: str = "") -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} keeps a recurrent state of an unknown kind{what}",
        "choose a model with gated delta nets, Mamba-2 or short convolutions",
    )


def _causal_conv(
    hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None, **_: Any
) -> torch.Tensor:
    """Convolve each channel of [B, F, history + S] separately, and return the last S columns.

    A convolution kernel may round a column differently depending on the number of columns; a sum of products does not.
    """
    taps = weight.shape[-1]
    columns = hidden_states.shape[-1] - (taps - 1)
    output = hidden_states[..., :columns] * weight[:, 0, None]
    for at in range(1, taps):
        output = output + hidden_states[..., at : at + columns] * weight[:, at, None]
    if bias is not None:
        output = output + bias[:, None]
    if activation is not None:
        output = ACT2FN[activation](output)
    return output


def _gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Replace transformers' function of the same arguments and shapes (Yang et al. 2024, arXiv 2412.06464)."""
    dtype = query.dtype
    query, key, value, decay, beta = (each.float() for each in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + 1e-6) for each in (query, key))
    output = _current.get().recur(GATED_DELTA, query * query.shape[-1] ** -0.5, key, value, decay, beta)
    return output.to(dtype), None


def _mamba2_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> Any:
    """Replace transformers' function of the same arguments and shapes (Dao and Gu 2024, arXiv 2405.21060).

    The state has keys B and values x dt. It decays by exp(A dt). The queries C read it.
    """
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).float()
    low, high = dt_limit
    if low > 0 or high != float("inf"):
        dt = dt.clamp(low, high)
    x, key, query = (each.float() for each in (hidden_states, B, C))
    output = _current.get().recur(GATED, query, key, x * dt[..., None], A.float() * dt)
    output = output if D is None else output + x * D[:, None]
    return (output, None) if return_final_states else output


FUNCTIONS |= {
    "causal_conv1d_fn": _causal_conv,
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "mamba2_chunk_scan": _mamba2_scan,
}
