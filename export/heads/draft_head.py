"""What all draft heads have in common: their checkpoints, what they take from their target, and their outer layers."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from outrider.errors import OutriderError, SourceError, UnsupportedModelError
from outrider.export.checkpoints.source import AGAIN, Source
from outrider.export.heads.draft_head_config import Layers, not_known
from outrider.export.heads.short_head import ShortHead

FILES, INDEX = ("model.safetensors", "pytorch_model.bin"), "model.safetensors.index.json"
LAYERS = "layers.0."
NOT_OURS = ("verifier_norm.weight", "verifier_lm_head.weight", "t2d", "d2t")  # of training; the last two are read elsewhere
OTHER_HEAD = "choose a head that was made for this target"


@dataclass(frozen=True, slots=True)
class Target:
    """What a head takes from its target, and must fit."""

    name: str
    layers: int
    hidden_size: int
    vocab_rows: int
    embedding: torch.Tensor  # [V, Ht]
    output_head: torch.Tensor | None  # [V, Ht]; None if it is more than a matrix
    model: PreTrainedModel | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, name: str = "the target") -> Target:
        """Return what a head takes from a model."""
        config, head = model.config.get_text_config(), model.get_output_embeddings()
        output_head = head.weight if getattr(head, "bias", None) is None else None
        embedding, rows = model.get_input_embeddings().weight, int(head.weight.shape[0])
        return cls(name, config.num_hidden_layers, config.hidden_size, rows, embedding, output_head, model)


class Config(Protocol):
    """What the configurations of all kinds of heads say."""

    @property
    def layers(self) -> Layers:
        """The decoder layers."""

    @property
    def target_hidden_size(self) -> int:
        """The width of the target that it was made for."""

    @property
    def draft_vocab(self) -> int:
        """The tokens that it proposes."""

    @property
    def tied(self) -> bool:
        """Whether its output head is its embedding."""

    @property
    def mask_token(self) -> int | None:
        """What stands for tokens not known yet, in a head that drafts several in one pass."""


class FeatureMixer(nn.Module, ABC):
    """What the target's graph computes for a head, once for each of its rows."""

    ids: list[int]  # the features are what enters these layers of the target; their number stands for the last one's output
    hidden_size: int  # of what it makes of them

    @abstractmethod
    def forward(self, hidden: list[torch.Tensor]) -> torch.Tensor:
        """Return features [B, S, H] of hidden states, [B, S, Ht] for each of `ids`."""


class DraftHead(ABC):
    """A head over features; it is a model of transformers, too."""

    @property
    def block_state(self) -> int | None:
        """The width of what it gives to further heads of its own; None if there are none."""
        return None

    @abstractmethod
    def forward(
        self, input_ids: torch.Tensor, features: torch.Tensor, position_ids: torch.Tensor, past_key_values: Any
    ) -> tuple[torch.Tensor, ...]:
        """Return logits [B, S, V], what the next draft step may take for its feature, [B, S, H], and what a head adds to that.

        Args:
            input_ids: int64 [B, S].
            features: [B, S, H].
            position_ids: int64 [B, S].
            past_key_values: transformers' cache, which is updated.
        """


class QwenHead(Qwen3ForCausalLM, DraftHead):  # type: ignore[misc]  # transformers is untyped here
    """A head of the layers of Qwen3; those of a Llama have no norms of queries and keys."""

    def __init__(self, decoder: Qwen3Config, layers: Layers, draft_vocab: int):
        """Make a head without weights for its embedding and its output head, which are as large as the target's."""
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
    """The configuration and the tensors of a head, by the names of speculators."""

    name: str
    config: Config
    tensors: dict[str, torch.Tensor]

    @classmethod
    @abstractmethod
    def read(cls, source: Source) -> HeadCheckpoint[M, H]:
        """Read a checkpoint.

        Raises:
            SourceError: it cannot be read, or its configuration is impossible.
            UnsupportedModelError: its configuration has a key or a value that is not known here.
        """

    @abstractmethod
    def layer_ids(self, target: Target) -> list[int]:
        """Return the layers of the target whose inputs are the features, in order; the number of layers is its output."""

    @abstractmethod
    def modules(self, ids: list[int], target: Target) -> tuple[M, H]:
        """Return what the target's graph computes, and the head, both without weights."""

    def features_of(self, target: Target) -> list[int]:
        """Return the layers of the target whose inputs are the features, after checking that the head fits.

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
            raise self._other_target(target, f"it reads what enters layers {ids}, and the target has {layers}")
        if config.mask_token is not None and config.mask_token >= target.vocab_rows:
            raise self._other_target(target, f"its mask token is {config.mask_token:,}, of {target.vocab_rows:,}")
        return ids

    def _other_target(self, target: Target, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.name} is a head for another target than {target.name}: {why}", OTHER_HEAD)

    def tokens(self, target: Target) -> torch.Tensor:
        """Return the target's ids of the tokens that the head proposes, int64 [Vd], ascending.

        Raises:
            SourceError: `d2t` has not one entry for each of them, leads to tokens that the target lacks, or is missing.
        """
        count, offsets = self.config.draft_vocab, self.tensors.get("d2t")
        if offsets is None:
            if count != target.vocab_rows:
                raise SourceError(
                    f"{self.name} proposes {count:,} of {target.vocab_rows:,} tokens, and has no tensor d2t that names them",
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
        """Return what the target's graph computes, and the head, in fp32.

        Raises:
            SourceError: a tensor is missing or has another shape, or the sizes contradict each other.
            UnsupportedModelError: a tensor is not known here, or the head was made for another target.
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
            raise SourceError(
                f"the configuration of {self.name} is impossible: {' '.join(str(error).split())[:300]}", AGAIN
            ) from error
        self._fill(mixer, {name: tensor for name, tensor in tensors.items() if self.of_mixer(name)})
        outer = tuple(f"{name}." for name, _ in head.named_children() if name != "model")
        places = {name: name if name.startswith(outer) else f"model.{name}" for name in tensors if not self.of_mixer(name)}
        self._fill(head, {places[name]: tensors[name] for name in places})
        if len(tokens) < target.vocab_rows:
            head.set_output_embeddings(ShortHead(head.lm_head, tokens, target.vocab_rows))
        self.finish(mixer, head)
        return mixer, head

    def finish(self, mixer: M, head: H) -> None:  # most need nothing
        """Do what takes the weights of both."""

    def of_mixer(self, name: str) -> bool:
        """Return whether a tensor takes part in making the features."""
        return name.startswith("fc.")

    def _fill(self, module: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
        wanted = module.state_dict()
        names = {name: name.removeprefix("model.") for name in {*wanted, *tensors}}
        if unknown := sorted(tensors.keys() - wanted.keys()):
            raise not_known(self.name, f"the tensor {names[unknown[0]]}")
        for name, tensor in wanted.items():
            if name not in tensors:
                raise SourceError(f"{self.name} has no tensor {names[name]}", AGAIN)
            if tensors[name].shape != tensor.shape:
                shapes = " and not ".join("x".join(map(str, each.shape)) for each in (tensors[name], tensor))
                raise SourceError(f"{names[name]} of {self.name} has the shape {shapes}", AGAIN)
        module.load_state_dict({name: tensor.to(torch.float32, copy=True) for name, tensor in tensors.items()}, assign=True)
        module.requires_grad_(False).eval()


def checkpoint_names(source: Source) -> dict[str, str]:
    """Return the names of the tensors in a checkpoint's safetensors, and the file that each is in; none of other formats.

    Raises:
        SourceError: it cannot be read.
    """
    if source.options:
        return {}
    try:
        if (index := source.file(INDEX)) is not None:
            return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        if (path := source.file(FILES[0])) is None:
            return {}
        with safe_open(path, framework="pt") as file:
            return dict.fromkeys(file.keys(), FILES[0])
    except OutriderError:
        raise
    except Exception as error:  # safetensors and json raise errors of many types
        raise _unreadable(source, error) from error


def read_tensors(source: Source, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Return some of what `checkpoint_names` has listed.

    Raises:
        SourceError: they cannot be read.
    """
    tensors: dict[str, torch.Tensor] = {}
    try:
        for each in sorted({*names.values()}):
            with safe_open(source.file(each), framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name, place in names.items() if place == each}
    except OutriderError:
        raise
    except Exception as error:
        raise _unreadable(source, error) from error
    return tensors


def _unreadable(source: Source, error: Exception) -> SourceError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return SourceError(f"cannot read the weights of {source.name}: {reason[:300]}", AGAIN)


def load_tensors(source: Source) -> dict[str, torch.Tensor]:
    """Return the tensors of a head's checkpoint.

    Raises:
        SourceError: it cannot be read.
    """
    index = source.file(INDEX)
    path = index or next((found for name in FILES if (found := source.file(name)) is not None), None)
    if path is None:
        raise SourceError(f"{source.name} has no weights", f"a head has one of {', '.join((*FILES, INDEX))}")
    try:
        if path == index:
            names = sorted({*json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()})
            return {key: tensor for name in names for key, tensor in load_file(str(source.file(name))).items()}
        if path.suffix == ".safetensors":
            return load_file(path)
        loaded: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        if not all(isinstance(each, torch.Tensor) for each in loaded.values()):
            raise ValueError("it has more than tensors")
    except Exception as error:  # safetensors and torch raise errors of many types
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SourceError(f"cannot read {path.name} of {source.name}: {reason[:300]}", AGAIN) from error
    return loaded
