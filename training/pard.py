"""Trains parallel drafts (PARD, An et al. 2025): a small language model learns to predict tokens after mask tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from outrider.export.checkpoints.checkpoint import load_model, read_config
from outrider.export.checkpoints.source import MASK_TOKEN, Source
from outrider.export.checkpoints.tokenizer import load_tokenizer
from outrider.export.checkpoints.vocabulary import check_same_vocabulary
from outrider.runtime.drafters.parallel import ParallelDrafter
from outrider.training.answers import Example
from outrider.training.arguments import TrainingArguments
from outrider.training.loop import device
from outrider.training.objective import ROWS, Objective, TrainingBatch, mean_of_rows

KEPT, LEAST = 0.7, 0.2  # the share of mask chains that get one more mask, and the smallest share for any depth


class Rows(NamedTuple):
    """The rows [R] of one pass: a text, and masks after some of its tokens."""

    anchor: torch.Tensor  # int64, the last token of the text that a row may attend to
    depth: torch.Tensor  # int64, 0 for a token of the text, or 1, 2, ... for the masks after the anchor

    @property
    def positions(self) -> torch.Tensor:
        """The position of each row in the text, int64 [R]."""
        return self.anchor + self.depth

    def visible(self) -> torch.Tensor:
        """Return bool [R, R]: a row attends to the text up to its anchor, and to the anchor's masks up to itself."""
        text = (self.depth[None] == 0) & (self.anchor[None] <= self.anchor[:, None])
        masks = (self.depth[None] > 0) & (self.anchor[None] == self.anchor[:, None]) & (self.depth[None] <= self.depth[:, None])
        return text | masks


class PardObjective(Objective):
    """A language model that drafts several tokens in one pass.

    The loss is the cross-entropy with the assistant's tokens. Each is predicted from the previous token, and from up to
    steps - 1 masks after earlier tokens. Fewer tokens get deeper masks, which saves time (section 3.3).
    """

    drafter = ParallelDrafter.name

    @classmethod
    def check(cls, target: Source, start: Source | None) -> int | None:
        assert start is not None
        read_config(target)
        config = read_config(start).get_text_config()
        check_same_vocabulary(load_tokenizer(target).vocabulary(), load_tokenizer(start).vocabulary())
        limit: int | None = getattr(config, "max_position_embeddings", None)
        return limit

    @classmethod
    def open(cls, arguments: TrainingArguments, examples: Sequence[Example]) -> PardObjective:
        start = arguments.start
        assert start is not None
        model = load_model(start, "fp32")
        model.set_attn_implementation("sdpa")
        config = start.config()
        stored = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), torch.float32)
        return cls(model.to(device()), start.read("tokenizer", AutoTokenizer), arguments.options["k"], stored)

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, steps: int, stored: torch.dtype = torch.float32
    ):
        """Take a model that `write` stores in the type `stored`.

        A model without a mask token gets one: an unused id, or a new row of its embedding.
        """
        super().__init__()
        self._stored = stored
        self.steps, self.tokenizer = steps, tokenizer
        mask = getattr(model.config, MASK_TOKEN, None)
        if mask is None:
            used, rows = max(tokenizer.get_vocab().values()) + 1, model.get_input_embeddings().weight.shape[0]
            mask = used if used < rows else rows
            if mask == rows:
                model.resize_token_embeddings(rows + 1, mean_resizing=False)
            with torch.no_grad():
                embedding = model.get_input_embeddings().weight
                embedding[mask] = embedding[:used].mean(0)
            setattr(model.config, MASK_TOKEN, mask)
        self.model, self.mask = model.requires_grad_(True), int(mask)

    def forward(self, ids: torch.Tensor, drafted: torch.Tensor) -> dict[str, torch.Tensor]:
        count = ids.shape[1]
        begins = drafted.any(0)[1:].nonzero()[:, 0]  # the tokens before tokens to learn
        rows = self._rows(count, begins, self._depths(len(begins)).to(ids.device))
        hidden = self.read(ids, rows)
        follows = rows.positions + 1
        inside = follows < count
        follows = follows.clamp(max=count - 1)
        wanted = drafted[:, follows] & inside
        head = self.model.get_output_embeddings()

        def loss(hidden: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(head(hidden).float(), token, reduction="sum")

        return {"loss": mean_of_rows(loss, hidden[wanted], ids[:, follows][wanted])}

    def agreement(self, batch: TrainingBatch) -> torch.Tensor:
        ids = batch.ids.to(self.model.device)
        count = ids.shape[1]
        first = max(int(batch.drafted.any(0).nonzero()[0, 0]) - 1, 0)
        anchors = torch.arange(first, count, device=ids.device)
        rows = self._rows(count, anchors, torch.full_like(anchors, self.steps - 1))
        head = self.model.get_output_embeddings()
        proposed = torch.cat([head(part).argmax(-1) for part in torch.split(self.read(ids, rows), ROWS, 1)], 1)
        padded = nn.functional.pad(ids, (0, self.steps + 1), value=-1)
        agrees = torch.zeros(*ids.shape, self.steps, dtype=torch.bool, device=ids.device)
        agrees[:, rows.anchor, rows.depth] = proposed == padded[:, rows.positions + 1]
        return agrees

    def _depths(self, count: int) -> torch.Tensor:
        """Draw the number of masks, 0..steps - 1, for each of `count` tokens."""
        shares = torch.tensor([max(KEPT**depth, LEAST) for depth in range(1, self.steps)])
        return (torch.rand(count, 1) < shares).sum(1)

    def _rows(self, count: int, anchors: torch.Tensor, depths: torch.Tensor) -> Rows:
        text = torch.arange(count, device=anchors.device)
        behind = torch.arange(1, self.steps, device=anchors.device).expand(len(anchors), -1)
        chosen = behind <= depths[:, None]
        masks = anchors[:, None].expand_as(behind)[chosen]
        return Rows(torch.cat([text, masks]), torch.cat([torch.zeros_like(text), behind[chosen]]))

    def read(self, ids: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return the last hidden states [B, R, H]."""
        tokens = torch.where(rows.depth > 0, self.mask, ids[:, rows.anchor])
        visible = rows.visible()
        mask = torch.zeros(visible.shape, device=ids.device, dtype=self.model.dtype)
        mask = mask.masked_fill(~visible, torch.finfo(mask.dtype).min)[None, None].expand(len(ids), -1, -1, -1)
        output = self.model.base_model(
            input_ids=tokens, position_ids=rows.positions[None].expand_as(tokens), attention_mask=mask, use_cache=False
        )
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def write(self, folder: Path) -> None:
        self.model.to(self._stored).save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
