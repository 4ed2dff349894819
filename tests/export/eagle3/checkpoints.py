"""Checkpoints of the cases' heads, as files, and the targets that they are for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from outrider.export.heads.draft_head import Target
from outrider.tests.export.eagle3 import cases, weights
from outrider.tests.export.head_files import Change, write_head


def write(folder: Path, name: str, change: Change | None = None) -> Path:
    """A case's checkpoint; see `write_head`."""
    return write_head(folder, *weights.checkpoint(name), change, cases.ALL[name].file)


def target(name: str, **changes: Any) -> Target:
    case, arrays = cases.ALL[name], weights.target(name)
    embedding, head = (torch.from_numpy(arrays[key]) for key in ("model.embed_tokens.weight", "lm_head.weight"))
    given = {"layers": cases.TARGET_LAYERS, "hidden_size": case.target_hidden, "vocab_rows": cases.VOCAB}
    return Target(name="the target", **(given | changes), embedding=embedding, output_head=head)
