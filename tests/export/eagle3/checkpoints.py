"""Checkpoints of the cases' heads, as files, and the targets that they are for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from outrider.export.heads.draft_head import Target
from outrider.tests.export.eagle3 import cases, weights

Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


def write(folder: Path, name: str, change: Change | None = None) -> Path:
    """A case's checkpoint as its trainer writes it, perhaps changed."""
    config, arrays = weights.checkpoint(name)
    tensors = {key: torch.from_numpy(np.ascontiguousarray(array)) for key, array in arrays.items()}
    if change is not None:
        change(config, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / cases.ALL[name].file
    torch.save(tensors, path) if path.suffix == ".bin" else save_file(tensors, path)
    return folder


def target(name: str, **changes: Any) -> Target:
    case, arrays = cases.ALL[name], weights.target(name)
    embedding, head = (torch.from_numpy(arrays[key]) for key in ("model.embed_tokens.weight", "lm_head.weight"))
    given = {"layers": cases.TARGET_LAYERS, "hidden_size": case.target_hidden, "vocab_rows": cases.VOCAB}
    return Target(name="the target", **(given | changes), embedding=embedding, output_head=head)
