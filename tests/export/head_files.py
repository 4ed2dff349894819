"""Checkpoints of draft heads, as files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


def write_head(
    folder: Path,
    config: dict[str, Any],
    arrays: dict[str, np.ndarray],
    change: Change | None = None,
    file: str = "model.safetensors",
) -> Path:
    """A checkpoint as its trainer writes it, perhaps changed."""
    tensors = {key: torch.from_numpy(np.ascontiguousarray(array)) for key, array in arrays.items()}
    if change is not None:
        change(config, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / file
    torch.save(tensors, path) if path.suffix == ".bin" else save_file(tensors, path)
    return folder
