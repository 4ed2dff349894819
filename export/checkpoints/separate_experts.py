"""Read experts that a checkpoint stores as matrices of their own, where a model of transformers expects them joined.

For most mixtures transformers joins them itself. Qwen3-VL-MoE was published joined, and quantizers take it apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from outrider.errors import UnsupportedModelError
from outrider.export.checkpoints.packed_weight import OTHERWISE

SEPARATE = re.compile(r"experts\.\d+\.(?:gate|up|down)_proj\.weight")
JOINED = "gate_up_proj"


def joining(model: PreTrainedModel, names: Iterable[str], converters: Iterable[WeightConverter]) -> list[WeightConverter]:
    """Return what joins the experts of a checkpoint's tensors, unless some of `converters`, transformers' own, do so.

    Raises:
        UnsupportedModelError: the model has its experts in another order.
    """
    # Phi-3's and GLM's dense layers have a product of this name.
    joined = [(each, getattr(each, JOINED, None)) for each in model.modules()]
    experts = [each for each, weight in joined if isinstance(weight, torch.Tensor) and weight.dim() == 3]
    separate = next(filter(SEPARATE.search, names), None)
    if separate is None or not experts or any("experts.*." in each for own in converters for each in own.source_patterns):
        return []
    if not all(getattr(each, "is_concatenated", False) and not getattr(each, "is_transposed", True) for each in experts):
        kind = model.config.model_type
        raise UnsupportedModelError(f"{separate} is of a single expert; of {kind}, only joined experts are read", OTHERWISE)
    gate, up, down = (f"experts.*.{each}_proj.weight" for each in ("gate", "up", "down"))
    return [
        WeightConverter([gate, up], f"experts.{JOINED}", operations=[MergeModulelist(dim=0), Concatenate(dim=1)]),
        WeightConverter(down, "experts.down_proj", operations=[MergeModulelist(dim=0)]),
    ]
