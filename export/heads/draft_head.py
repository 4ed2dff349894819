"""The base of all draft heads: their checkpoints, the parts that they share with the target, and their outer layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from outrider.errors import OutriderError, SourceError, UnsupportedModelError
from outrider.export.checkpoints.source import AGAIN, Source, reason_of
from outrider.export.heads.draft_head_config import HeadConfig, Layers, unknown
from outrider.export.heads.short_head import ShortHead

LAYERS = "layers.0."
NOT_OURS = ("verifier_norm.weight", "verifier_lm_head.weight", "t2d", "d2t")  # only for training, or read by `tokens`
OTHER_HEAD = "choose a head that was made for this target"


@dataclass(frozen=True, slots=True)
class Target:
    """The parts and sizes of a target that a head uses."""

    name: str
    layers: int
    hidden_size: int
    vocab_rows: int
    embedding: torch.Tensor  # [V, Ht]
    output_head: torch.Tensor | None  # [V, Ht]; None if it also has a bias
    model: PreTrainedModel | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, name: str = "the target") -> Target:
        """Return what a head takes from a model."""
        config, head = model.config.get_text_config(), model.get_output_embeddings()
        output_head = head.weight if getattr(head, "bias", None) is None else None
        embedding, rows = model.get_input_embeddings().weight, int(head.weight.shape[0])
        return cls(name, config.num_hidden_layers, config.hidden_size, rows, embedding, output_head, model)


class FeatureMixer(nn.Module, ABC):
    """Makes features from hidden states, in the target's graph, once per row."""

    ids: list[int]  # reads the inputs of these layers of the target; the number of layers stands for the last one's output
    hidden_size: int  # width of the features

    @abstractmethod
    def forward(self, hidden: list[torch.Tensor]) -> torch.Tensor:
        """Return features [B, S, H] from hidden states, [B, S, Ht] for each of `ids`."""


class DraftHead(ABC):
    """A head that reads features. It is also a transformers model."""

    mask_token: int | None = None  # stands for unknown tokens, if the head drafts several in one pass
    block_state: int | None = None  # numbers per row that a block head passes to its Markov and confidence heads
    from_anchor: bool = False  # whether a block head drafts from its anchor's row too
    trained_k: int | None = None  # tokens that a block head was trained to draft

    @abstractmethod
    def forward(
        self, input_ids: torch.Tensor, features: torch.Tensor, position_ids: torch.Tensor, past_key_values: Any
    ) -> tuple[torch.Tensor, ...]:
        """Return logits [B, S, V] and the features [B, S, H] for the next draft step; a head may return more.

        Args:
            input_ids: int64 [B, S].
            features: [B, S, H].
            position_ids: int64 [B, S].
            past_key_values: the transformers cache to update.
        """


class QwenHead(Qwen3ForCausalLM, DraftHead):  # type: ignore[misc]  # transformers is untyped here
    """A head with Qwen3's layers; Llama's layers have no norms of queries and keys."""

    def __init__(self, decoder: Qwen3Config, layers: Layers, draft_vocab: int):
        """Make a head whose embedding and output head have no weights yet, because they are as large as the target's."""
        vocab_rows, decoder.vocab_size = decoder.vocab_size, 1
        super().__init__(decoder)
        decoder.vocab_size = vocab_rows
        if layers.model_type == "llama":
            for each in self.model.layers:
                each.self_attn.q_norm, each.self_attn.k_norm = nn.Identity(), nn.Identity()
        self.model.embed_tokens = nn.Embedding(vocab_rows, decoder.hidden_size, device="meta")
        self.lm_head = nn.Linear(decoder.hidden_size, draft_vocab, bias=False, device="meta")


M = TypeVar("M", bound=FeatureMixer)
H = TypeVar("H", bound=QwenHead)


@dataclass(frozen=True, slots=True)
class HeadCheckpoint(ABC, Generic[M, H]):
    """The configuration and the tensors of a head. The tensors have speculators' names."""

    of_mixer: ClassVar[tuple[str, ...]]  # how the names of the mixer's tensors begin

    name: str
    config: HeadConfig
    tensors: dict[str, torch.Tensor]

    @classmethod
    @abstractmethod
    def read(cls, source: Source) -> HeadCheckpoint[M, H]:
        """Read a checkpoint.

        Raises:
            SourceError: it cannot be read, or its configuration is impossible.
            UnsupportedModelError: its configuration has an unknown key or value.
        """

    @abstractmethod
    def layer_ids(self, target: Target) -> list[int]:
        """Return the layers of the target whose inputs are the features; the number of layers stands for the last output."""

    @abstractmethod
    def modules(self, ids: list[int], target: Target) -> tuple[M, H]:
        """Return the mixer for the target's graph, and the head, both without weights."""

    def features_of(self, target: Target) -> list[int]:
        """Check that the head fits the target, and return the layers of the target whose inputs are the features.

        Raises:
            UnsupportedModelError: the head was made for another target.
        """
        layers, config, ids = target.layers, self.config, self.layer_ids(target)
        fc = self.tensors.get("fc.weight")
        if fc is None or fc.dim() != 2:
            raise SourceError(f"{self.name} has no matrix fc.weight", AGAIN)
        differs = {
            "hidden size": (config.target_hidden_size, target.hidden_size),
            "vocabulary": (config.layers.vocab_size, target.vocab_rows),
            "inputs of fc": (fc.shape[1], len(ids) * target.hidden_size),
        }
        for what, (own, other) in differs.items():
            if own != other:
                raise self._other_target(target, f"its {what} is {own:,}, and the target's {other:,}")
        if not all(0 <= each <= layers for each in ids):
            raise self._other_target(target, f"it reads the inputs of layers {ids}, and the target has {layers} layers")
        if config.mask_token is not None and config.mask_token >= target.vocab_rows:
            raise self._other_target(
                target, f"its mask token is {config.mask_token:,}, and the target has {target.vocab_rows:,} tokens"
            )
        return ids

    def _other_target(self, target: Target, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.name} was not made for {target.name}: {why}", OTHER_HEAD)

    def tokens(self, target: Target) -> torch.Tensor:
        """Return the target's ids of the tokens that the head can propose, int64 [Vd], in ascending order.

        Raises:
            SourceError: `d2t` is missing, has the wrong number of entries, or points to tokens that the target lacks.
        """
        count, offsets = self.config.draft_vocab, self.tensors.get("d2t")
        if offsets is None:
            if count != target.vocab_rows:
                raise SourceError(
                    f"{self.name} proposes {count:,} of {target.vocab_rows:,} tokens, but has no tensor d2t to name them",
                    AGAIN,
                )
            return torch.arange(count)
        listed = offsets.shape == (count,) and not offsets.is_floating_point()
        ids = offsets.long() + torch.arange(count) if listed else offsets
        if not listed or (ids.diff() <= 0).any() or not 0 <= int(ids[0]) <= int(ids[-1]) < target.vocab_rows:
            raise SourceError(
                f"d2t of {self.name} is not a list of {count:,} tokens in ascending order below {target.vocab_rows:,}", AGAIN
            )
        return ids

    def build(self, target: Target) -> tuple[M, H]:
        """Return the mixer for the target's graph, and the head, in fp32.

        Raises:
            SourceError: a tensor is missing or has the wrong shape, or the sizes contradict each other.
            UnsupportedModelError: a tensor is unknown, or the head was made for another target.
        """
        ids, config = self.features_of(target), self.config
        tensors, tokens = dict(self.tensors), self.tokens(target)
        for name in NOT_OURS:
            tensors.pop(name, None)
        own = config.target_hidden_size == config.layers.hidden_size
        lent = {"embed_tokens.weight": target.embedding, "lm_head.weight": target.output_head}
        for name in sorted(lent.keys() - tensors.keys()):
            weight = lent[name]
            if not own or weight is None or (name == "lm_head.weight" and config.tied):
                raise SourceError(f"{self.name} has no {name}, and the target's does not fit", OTHER_HEAD)
            tensors[name] = weight[tokens] if name == "lm_head.weight" else weight
        try:
            mixer, head = self.modules(ids, target)
        except (MemoryError, OutriderError):
            raise
        except Exception as error:  # transformers raises errors of any type where sizes contradict each other
            raise SourceError(f"the configuration of {self.name} is impossible: {reason_of(error)}", AGAIN) from error
        self._fill(mixer, {name: each for name, each in tensors.items() if name.startswith(self.of_mixer)})
        outer = tuple(f"{name}." for name, _ in head.named_children() if name != "model")
        inner = {name: each for name, each in tensors.items() if not name.startswith(self.of_mixer)}
        self._fill(head, {name if name.startswith(outer) else f"model.{name}": each for name, each in inner.items()})
        if len(tokens) < target.vocab_rows:
            head.set_output_embeddings(ShortHead(head.lm_head, tokens, target.vocab_rows))
        self.finish(mixer, head)
        return mixer, head

    @abstractmethod
    def finish(self, mixer: M, head: H) -> None:
        """Do the steps that need the weights of both."""

    def _fill(self, module: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
        wanted = module.state_dict()
        names = {name: name.removeprefix("model.") for name in {*wanted, *tensors}}
        if others := sorted(tensors.keys() - wanted.keys()):
            raise unknown(self.name, f"the tensor {names[others[0]]}")
        for name, tensor in wanted.items():
            if name not in tensors:
                raise SourceError(f"{self.name} has no tensor {names[name]}", AGAIN)
            if tensors[name].shape != tensor.shape:
                shapes = " and not ".join("x".join(map(str, each.shape)) for each in (tensors[name], tensor))
                raise SourceError(f"{names[name]} of {self.name} has the shape {shapes}", AGAIN)
        module.load_state_dict({name: tensor.to(torch.float32, copy=True) for name, tensor in tensors.items()}, assign=True)
        module.requires_grad_(False).eval()
