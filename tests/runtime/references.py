"""Drafters in eager transformers, which read the whole text for every draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import DynamicCache, LlamaForCausalLM

from outrider.engines.contract import CONTEXT
from outrider.export.checkpoints.source import Source
from outrider.export.graph.features import entering
from outrider.export.heads.block_head import BlockCheckpoint
from outrider.export.heads.draft_head import HeadCheckpoint, Target
from outrider.export.heads.eagle3 import Eagle3Checkpoint
from outrider.export.heads.markov import MarkovStep
from outrider.tests.support import PAIR


class Reference(Protocol):
    """A drafter in eager transformers, which reads the whole text for every draft."""

    def proposes(self, tokens: tuple[int, ...], k: int) -> tuple[int, ...]:
        """Return the k most likely tokens after these."""


class HeadReference:
    """A draft head with its target."""

    checkpoint: type[HeadCheckpoint[Any, Any]] = Eagle3Checkpoint

    def __init__(self, head: Path) -> None:
        self.target = LlamaForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32).eval()
        config = self.target.config
        weights = self.target.get_input_embeddings().weight, self.target.lm_head.weight
        target = Target("target", config.num_hidden_layers, config.hidden_size, config.vocab_size, *weights)
        self.mixer, self.head = self.checkpoint.read(Source.parse(str(head))).build(target)
        self.read: dict[tuple[int, ...], torch.Tensor] = {}  # the features of whole texts

    def features(self, tokens: tuple[int, ...]) -> torch.Tensor:
        """Return the features of all tokens but the last. Those of a text's beginning are the same in the whole text."""
        text = next((each for each in self.read if each[: len(tokens)] == tokens), tokens)
        if text not in self.read:
            with entering(self.target, self.mixer.ids) as hidden:
                self.target(torch.tensor([text]))
            self.read[text] = self.mixer(hidden)
        return self.read[text][:, : len(tokens) - 1]

    @torch.no_grad()
    def proposes(self, tokens: tuple[int, ...], k: int) -> tuple[int, ...]:
        features, following, drafted = self.features(tokens), torch.tensor([tokens[1:]]), []
        for _ in range(k):
            rows = torch.arange(following.shape[1])[None]
            logits, made = self.head(following, features, rows, DynamicCache())
            drafted.append(int(logits[0, -1].argmax()))
            following = torch.cat([following, torch.tensor([drafted[-1:]])], 1)
            features = torch.cat([features, made[:, -1:]], 1)
        return tuple(drafted)


class ParallelHeadReference(HeadReference):
    """A draft head that reads masks, with its target."""

    @torch.no_grad()
    def proposes(self, tokens: tuple[int, ...], k: int) -> tuple[int, ...]:
        following = torch.cat([torch.tensor([tokens[1:]]), torch.full((1, k - 1), self.head.mask_token)], 1)
        features = torch.nn.functional.pad(self.features(tokens), (0, 0, 0, k - 1))
        logits, _ = self.head(following, features, torch.arange(following.shape[1])[None], DynamicCache())
        return tuple(logits[0, -k:].argmax(-1).tolist())


class BlockReference(HeadReference):
    """A block head with its target."""

    checkpoint = BlockCheckpoint

    def proposes(self, tokens: tuple[int, ...], k: int) -> tuple[int, ...]:
        return self.drafts(tokens, k)[0]

    @torch.no_grad()
    def drafts(self, tokens: tuple[int, ...], k: int) -> tuple[tuple[int, ...], list[float]]:
        """Return the proposed tokens, and how sure the head's own confidence head is of each, if it has one."""
        context, mask = len(tokens) - 1, self.target.config.vocab_size - 1
        ids = torch.tensor([[CONTEXT] * context + [tokens[-1]] + [mask] * (k - self.head.from_anchor)])
        features = torch.nn.functional.pad(self.features(tokens), (0, 0, 0, ids.shape[1] - context))
        logits, _, *states = self.head(ids, features, torch.arange(ids.shape[1])[None], DynamicCache())
        if not states:
            return tuple(logits[0, -k:].argmax(-1).tolist()), []
        (state,) = states
        drafted, step, confidences = [tokens[-1]], MarkovStep(self.head), list[float]()
        for row in range(-k, 0):
            biased, confidence = step(logits[:, [row]], state[:, [row]], torch.tensor([drafted[-1:]]))
            drafted.append(int(biased.argmax()))
            confidences.append(float(confidence))
        return tuple(drafted[1:]), confidences


class ModelReference:
    """A draft model."""

    def __init__(self, draft: Path) -> None:
        self.draft = LlamaForCausalLM.from_pretrained(draft, dtype=torch.float32).eval()

    @torch.no_grad()
    def proposes(self, tokens: tuple[int, ...], k: int) -> tuple[int, ...]:
        text = [*tokens]
        for _ in range(k):
            text.append(int(self.draft(torch.tensor([text])).logits[0, -1].argmax()))
        return tuple(text[-k:])


class ParallelReference(ModelReference):
    """A parallel draft."""

    @torch.no_grad()
    def proposes(self, tokens: tuple[int, ...], k: int) -> tuple[int, ...]:
        masks = [self.draft.config.pard_token] * (k - 1)
        return tuple(self.draft(torch.tensor([[*tokens, *masks]])).logits[0, -k:].argmax(-1).tolist())
