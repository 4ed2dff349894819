"""Training of EAGLE-3 heads: the same modules that `export` reads checkpoints into, with several draft steps ahead."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from outrider.export.eagle3 import LAYERS, MIDLAYER, Eagle3Checkpoint, Target
from outrider.export.eagle3_config import THETA, HeadConfig
from outrider.export.short_head import output_head
from outrider.export.source import Source
from outrider.export.step_model import entering
from outrider.training.chains import ATTENTION, chains
from outrider.training.objective import Batch, Objective

LATER_WEIGHT = 0.8  # of each draft step's loss, against the step before


def open_head(target: PreTrainedModel, source: Source | None, tokens: torch.Tensor, steps: int) -> Eagle3Objective:
    """Return the objective for a published head, or for a new one that proposes `tokens`, int64 [Vd] ascending.

    Raises:
        SourceError, UnsupportedModelError: the head cannot be read, or does not fit the target.
    """
    if source is not None:
        return Eagle3Objective(target, Eagle3Checkpoint.read(source), source.config(), steps)
    config = new_config(target, len(tokens))
    checkpoint = Eagle3Checkpoint("the new head", HeadConfig.parse(config, "the new head"), new_tensors(target, tokens, config))
    return Eagle3Objective(target, checkpoint, config, steps)


def new_config(target: PreTrainedModel, proposed: int) -> dict[str, Any]:
    """Return the configuration of a head with one Llama layer of the target's sizes, as SafeAILab's are."""
    text = target.config.get_text_config()
    heads = text.num_attention_heads
    rope = getattr(text, "rope_parameters", None) or {}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": text.hidden_size,
        "intermediate_size": text.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
        "rope_theta": rope.get("rope_theta", THETA),
        "max_position_embeddings": text.max_position_embeddings,
        "vocab_size": int(target.get_input_embeddings().weight.shape[0]),
        "draft_vocab_size": proposed,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
    }


def new_tensors(target: PreTrainedModel, tokens: torch.Tensor, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a head that begins with the target's last layer, norm and rows of its output head, as far as they
    have the same shapes; the embedding has no part in it yet."""
    width, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, narrow = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes = {
        **{f"self_attn.{name}_proj": (rows, 2 * width) for name, rows in (("q", query), ("k", narrow), ("v", narrow))},
        "self_attn.o_proj": (width, query),
        **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (inner, width)),
        "mlp.down_proj": (width, inner),
        **dict.fromkeys(("hidden_norm", "input_layernorm", "post_attention_layernorm"), (width,)),
    }
    generator = torch.Generator().manual_seed(0)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5 if len(shape) > 1 else torch.ones(shape)

    tensors = {f"{LAYERS}{name}.weight": matrix(*shape) for name, shape in shapes.items()}
    tensors |= {
        "fc.weight": matrix(width, 3 * width),
        "norm.weight": torch.ones(width),
        "lm_head.weight": matrix(len(tokens), width),
    }
    tensors["d2t"] = tokens - torch.arange(len(tokens))
    found = {name: each.detach().float() for name, each in target.get_decoder().state_dict().items()}
    last = f"layers.{target.config.get_text_config().num_hidden_layers - 1}."
    taken = {"norm.weight": "norm.weight", f"{LAYERS}hidden_norm.weight": f"{last}input_layernorm.weight"}
    taken |= {
        f"{LAYERS}{name}.weight": f"{last}{name}.weight"
        for name in shapes
        if not name.endswith(("hidden_norm", "input_layernorm"))
    }
    for name, source in taken.items():
        if (weight := found.get(source)) is None:
            continue
        if weight.dim() == 2 and 2 * weight.shape[1] == tensors[name].shape[1]:
            weight = torch.cat((torch.zeros_like(weight), weight), 1)
        if weight.shape == tensors[name].shape:
            tensors[name] = weight
    output = target.get_output_embeddings().weight.detach()
    if output.shape[1] == width:
        tensors["lm_head.weight"] = output[tokens].float()
    return tensors


class Eagle3Objective(Objective):
    """A head over a target that is not trained.

    The loss is the cross-entropy with the target's distribution over the tokens that the head proposes, for every token of the
    assistant in every step. Step s of the chain at row c reads token c + s + 1, and predicts token c + s + 2.
    """

    kept: torch.Tensor  # int64 [Vd], the ids of the tokens that it proposes, ascending

    def __init__(self, target: PreTrainedModel, checkpoint: Eagle3Checkpoint, config: dict[str, Any], steps: int):
        """Take a checkpoint, with the `config.json` that goes with it.

        Raises:
            SourceError, UnsupportedModelError: the head does not fit the target, or the target cannot give features.
        """
        super().__init__()
        self.steps, self._config, self._target = steps, config, [target]  # a list, so that the target is no part of the module
        facts = Target.of(target)
        self._names = [*checkpoint.tensors]
        self.mixer, self.head = checkpoint.build(facts)
        self.mixer.requires_grad_(True)
        self.head.requires_grad_(True)
        if "embed_tokens.weight" not in checkpoint.tensors:
            self.head.set_input_embeddings(target.get_input_embeddings())  # instead of a copy
        self.head.get_input_embeddings().requires_grad_(False)
        self.head.set_attn_implementation(ATTENTION)
        self.register_buffer("kept", checkpoint.tokens(facts), persistent=False)

    def forward(self, ids: torch.Tensor, drafted: torch.Tensor) -> dict[str, torch.Tensor]:
        features, hidden = self._read(ids)
        total = torch.zeros((), device=ids.device)
        for step, normed in enumerate(self._steps(features, ids)):
            wanted = drafted[:, step + 2 :]
            if not wanted.any():
                break
            with torch.no_grad():
                goal = self._target_logits(hidden[:, step + 1 : -1][wanted])[:, self.kept].float().softmax(-1)
            logits = self._rows(normed[:, : wanted.shape[1]][wanted])
            total = total + LATER_WEIGHT**step * nn.functional.cross_entropy(logits.float(), goal)
        return {"loss": total}

    def agreement(self, batch: Batch) -> torch.Tensor:
        ids = batch.ids.to(self.kept.device)
        features, _ = self._read(ids)
        agrees = torch.zeros(*ids.shape, self.steps, dtype=torch.bool, device=ids.device)
        for step, normed in enumerate(self._steps(features, ids)):
            following = ids[:, step + 2 :]
            rows = following.shape[1]
            proposed = self.kept[self._rows(normed[:, :rows]).argmax(-1)]
            agrees[:, 1 : rows + 1, step] = proposed == following  # the chain at row c drafts after token c + 1
        return agrees

    def _read(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the head's features of a text and the target's last hidden states, both [B, S, H]."""
        (target,) = self._target
        with torch.no_grad(), entering(target, self.mixer.ids) as entered:
            hidden = target.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return self.mixer([each.to(self.mixer.fc.weight.dtype) for each in entered]), hidden

    def _target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        (target,) = self._target
        logits: torch.Tensor = target.get_output_embeddings()(hidden)
        cap = getattr(target.config.get_text_config(), "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _rows(self, normed: torch.Tensor) -> torch.Tensor:
        """Return the logits of the tokens that the head proposes, [..., Vd]."""
        head = output_head(self.head)
        assert head is not None
        logits: torch.Tensor = head(normed)
        return logits

    def _steps(self, features: torch.Tensor, ids: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the normed hidden states [B, S - 1 - s, H] of each draft step s of the chains that begin at every row."""
        with chains(self.head.config.num_hidden_layers) as cache:
            for step in range(min(self.steps, ids.shape[1] - 2)):
                rows = ids.shape[1] - 1 - step
                positions = torch.arange(step, step + rows, device=ids.device)[None]
                normed, features = self.head.hidden(ids[:, step + 1 :], features[:, :rows], positions, cache)
                yield normed

    def write(self, folder: Path) -> None:
        tensors = {name: each.detach() for module in (self.mixer, self.head) for name, each in module.state_dict().items()}
        tensors = {name.removeprefix("model.").replace("lm_head.rows.", "lm_head."): each for name, each in tensors.items()}
        own = {name: tensors[name] for name in self._names if name in tensors}
        offsets = self.kept.cpu() - torch.arange(len(self.kept))
        rows = self._target[0].config.get_text_config().vocab_size
        own["d2t"], own["t2d"] = offsets, torch.zeros(rows, dtype=torch.bool).index_fill(0, self.kept.cpu(), True)
        first = LAYERS if "transformer_layer_config" in self._config else MIDLAYER  # speculators', or everybody else's
        stored = {
            name.replace(LAYERS, first, 1): (each.half() if each.is_floating_point() else each).cpu().contiguous()
            for name, each in own.items()
        }
        (folder / "config.json").write_text(json.dumps(self._config, indent=2) + "\n", encoding="utf-8")
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
