"""Trains EAGLE-3 heads, in the modules of `export`, with several draft steps ahead."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.errors import UnsupportedModelError
from outrider.export.checkpoints.checkpoint import load_model, read_config
from outrider.export.checkpoints.source import Source
from outrider.export.graph.features import decoder_layers, entering
from outrider.export.heads.draft_head import LAYERS, Target
from outrider.export.heads.draft_head_config import THETA
from outrider.export.heads.eagle3 import MIDLAYER, Eagle3Checkpoint
from outrider.export.heads.eagle3_config import Eagle3Config
from outrider.export.heads.short_head import output_head
from outrider.runtime.drafters.head import HeadDrafter
from outrider.training.answers import Example
from outrider.training.arguments import TrainingArguments
from outrider.training.chains import ATTENTION, chains
from outrider.training.loop import device, has_bf16
from outrider.training.objective import Objective, TrainingBatch, mean_of_rows

FEWEST_LAYERS = 3
NOISE = 0.1  # in a new head's features, so that all three layers get different gradients
LATER_WEIGHT = 0.8  # of a draft step's loss, relative to the previous step


def open_head(
    target: PreTrainedModel, source: Source | None, tokens: torch.Tensor, steps: int, seed: int = 0
) -> Eagle3Objective:
    """Return the objective for a published head, or for a new one for `tokens`, int64 [Vd] in ascending order.

    Raises:
        SourceError, UnsupportedModelError: the head cannot be read, or does not fit the target.
    """
    if source is not None:
        return Eagle3Objective(target, Eagle3Checkpoint.read(source), source.config(), steps)
    config = new_config(target, len(tokens))
    tensors = new_tensors(target, tokens, config, seed)
    checkpoint = Eagle3Checkpoint("the new head", Eagle3Config.parse(config, "the new head"), tensors, MIDLAYER)
    return Eagle3Objective(target, checkpoint, config, steps)


def frequent(examples: Sequence[Example], rows: int, count: int) -> torch.Tensor:
    """Return the most frequent tokens of the answers, int64 [count] in ascending order.

    If the answers have too few distinct tokens, the lowest of the vocabulary's `rows` ids fill the rest.
    """
    drafted = [token for example in examples for token, own in zip(*example, strict=True) if own]
    counts = torch.tensor(drafted).bincount(minlength=rows)[:rows]
    return counts.sort(descending=True, stable=True).indices[: min(count, rows)].sort().values


def new_config(target: PreTrainedModel, proposed: int) -> dict[str, Any]:
    """Return the configuration of a head with one Llama layer of the target's sizes, in SafeAILab's format.

    Raises:
        UnsupportedModelError: the target has fewer layers than a head reads.
    """
    text = target.config.get_text_config()
    heads, layers = text.num_attention_heads, text.num_hidden_layers
    if layers < FEWEST_LAYERS:
        raise UnsupportedModelError(
            f"the target has {layers} layers, but a head reads the inputs of {FEWEST_LAYERS} layers",
            "train a parallel draft: --kind pard",
        )
    rope = getattr(text, "rope_parameters", None) or {}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": text.hidden_size,
        "intermediate_size": getattr(text, "intermediate_size", None) or 4 * text.hidden_size,  # GPT-2's has none
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


def new_tensors(target: PreTrainedModel, tokens: torch.Tensor, config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a new head.

    It begins with the target's last layer, final norm and rows of the output head, where the shapes agree. The weights for the
    embedding begin as 0. The features begin as the input of the last of the three layers, which the target's last layer can
    read, plus a little noise from all three.
    """
    width, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, narrow = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes = {
        **{f"self_attn.{name}_proj": (rows, 2 * width) for name, rows in (("q", query), ("k", narrow), ("v", narrow))},
        "self_attn.o_proj": (width, query),
        **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (inner, width)),
        "mlp.down_proj": (width, inner),
        **dict.fromkeys(("hidden_norm", "input_layernorm", "post_attention_layernorm"), (width,)),
    }
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5 if len(shape) > 1 else torch.ones(shape)

    tensors = {f"{LAYERS}{name}.weight": matrix(*shape) for name, shape in shapes.items()}
    tensors |= {
        "fc.weight": matrix(width, 3 * width),
        "norm.weight": torch.ones(width),
        "lm_head.weight": matrix(len(tokens), width),
    }
    tensors["d2t"] = tokens - torch.arange(len(tokens))
    found, plain = target.get_decoder().state_dict(), _has_plain_norms(target)
    last = f"layers.{target.config.get_text_config().num_hidden_layers - 1}."
    taken = {"norm.weight": "norm.weight", f"{LAYERS}hidden_norm.weight": f"{last}input_layernorm.weight"}
    taken |= {
        f"{LAYERS}{name}.weight": f"{last}{name}.weight"
        for name in shapes
        if not name.endswith(("hidden_norm", "input_layernorm"))
    }
    for name, source in taken.items():
        if source not in found or not (plain or found[source].dim() > 1):
            continue
        weight = found[source].detach().float().cpu()
        if weight.dim() == 2 and 2 * weight.shape[1] == tensors[name].shape[1]:
            weight = torch.cat((torch.zeros_like(weight), weight), 1)
        if weight.shape == tensors[name].shape:
            tensors[name] = weight
    output = target.get_output_embeddings().weight.detach()
    if output.shape[1] == width:
        tensors["lm_head.weight"] = output[tokens.to(output.device)].cpu()
    tensors["fc.weight"] *= NOISE
    tensors["fc.weight"][:, -width:] += torch.eye(width)
    return {name: each.half() if each.is_floating_point() else each for name, each in tensors.items()}


def _has_plain_norms(target: PreTrainedModel) -> bool:
    """Return whether the target's norms multiply by their weights, like a head's. Gemma's add 1 to the weights first."""
    norm = getattr(target.get_decoder(), "norm", None)
    weight = getattr(norm, "weight", None)
    if norm is None or weight is None:
        return False
    x = torch.randn(1, 8, len(weight), device=weight.device, dtype=torch.float32)
    with torch.no_grad():
        expected = nn.functional.rms_norm(x, (len(weight),), weight.float(), 1e-6)
        return torch.allclose(norm(x.to(weight.dtype)).float(), expected, rtol=0.05, atol=0.05)


class Goal:
    """The target's logits of the tokens that a head can propose."""

    def __init__(self, target: PreTrainedModel, kept: torch.Tensor):
        """Take the rows `kept`, int64 [Vd], of a target's output head.

        Raises:
            UnsupportedModelError: the target computes its logits in an unknown way.
        """
        config, head = target.config.get_text_config(), target.get_output_embeddings()
        bias = getattr(head, "bias", None)
        everything = len(kept) == head.weight.shape[0]
        self._weight = head.weight if everything else head.weight[kept]
        self._bias = None if bias is None else bias[kept]
        # Granite divides its logits, Cohere multiplies them, and Gemma-2 caps them.
        self._scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
        self._cap = getattr(config, "final_logit_softcapping", None)
        ids = torch.arange(4, device=head.weight.device)[None]
        with torch.no_grad():
            hidden = target.base_model(input_ids=ids, use_cache=False).last_hidden_state
            expected, actual = target(input_ids=ids, use_cache=False).logits[..., kept].float(), self(hidden)
        if (actual - expected).abs().max() > 0.01 * expected.abs().max():
            raise UnsupportedModelError(f"{type(target).__name__} computes its logits in an unknown way")

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits [..., Vd] from the target's last hidden states [..., H]."""
        logits = nn.functional.linear(hidden, self._weight, self._bias).float() * self._scale
        return logits if self._cap is None else self._cap * torch.tanh(logits / self._cap)


class Eagle3Objective(Objective):
    """A head on a frozen target.

    The loss is the cross-entropy with the target's distribution over the tokens that the head can propose, for every token of
    the assistant in every step. Step s of the chain at row c reads token c + s + 1 and predicts token c + s + 2.
    """

    drafter = HeadDrafter.name
    kept: torch.Tensor  # int64 [Vd], the ids of the tokens that the head can propose, ascending

    @classmethod
    def check(cls, target: Source, start: Source | None) -> int | None:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(read_config(target))
        decoder_layers(model)
        facts = Target.of(model, target.name)
        if start is None:
            new_config(model, facts.vocab_rows)
        else:
            checkpoint = Eagle3Checkpoint.read(start)
            checkpoint.features_of(facts)
            checkpoint.tokens(facts)
        return None

    @classmethod
    def open(cls, arguments: TrainingArguments, examples: Sequence[Example]) -> Eagle3Objective:
        precision = "bf16" if has_bf16() else "fp32"
        target = load_model(arguments.target, precision, arguments.adapters).to(device())
        options = arguments.options
        tokens = frequent(examples, int(target.get_output_embeddings().weight.shape[0]), options["draft_vocab"])
        return open_head(target, arguments.start, tokens, options["k"], options["seed"])

    def __init__(self, target: PreTrainedModel, checkpoint: Eagle3Checkpoint, config: dict[str, Any], steps: int):
        """Take a checkpoint with its `config.json`.

        Raises:
            SourceError, UnsupportedModelError: the head does not fit the target, or the target cannot give features.
        """
        super().__init__()
        self.steps, self._config, self._target = steps, config, [target]  # in a list, so that it is no submodule
        facts, own = Target.of(target), checkpoint.tensors
        self._names, self._first, self._stored = [*own], checkpoint.first, own["fc.weight"].dtype
        if "embed_tokens.weight" not in own:
            facts = replace(facts, embedding=facts.embedding.to("meta"))  # instead of a copy
        self.mixer, self.head = checkpoint.build(facts)
        self.mixer.requires_grad_(True)
        self.head.requires_grad_(True)
        if "embed_tokens.weight" not in own:
            self.head.set_input_embeddings(target.get_input_embeddings())
        self.head.get_input_embeddings().requires_grad_(False)
        self.output = output_head(self.head)
        self.output.requires_grad_("lm_head.weight" in own)  # otherwise it is the target's
        self.head.set_attn_implementation(ATTENTION)
        self.register_buffer("kept", checkpoint.tokens(facts), persistent=False)
        self.to(target.device)
        self._goal = Goal(target, self.kept)

    def forward(self, ids: torch.Tensor, drafted: torch.Tensor) -> dict[str, torch.Tensor]:
        features, hidden = self.read(ids)
        total = torch.zeros((), device=ids.device)
        for step, normed in enumerate(self.unrolled(features, ids)):
            wanted = drafted[:, step + 2 :]
            if not wanted.any():
                break
            rows = normed[:, : wanted.shape[1]][wanted], hidden[:, step + 1 : -1][wanted]
            total = total + LATER_WEIGHT**step * mean_of_rows(self._loss, *rows)
        return {"loss": total}

    def _loss(self, normed: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the sum of the cross-entropies of the head's rows [N, H] with the target's [N, H]."""
        with torch.no_grad():
            goal = self._goal(hidden).softmax(-1)
        return nn.functional.cross_entropy(self.output(normed).float(), goal, reduction="sum")

    def agreement(self, batch: TrainingBatch) -> torch.Tensor:
        ids = batch.ids.to(self.kept.device)
        features, _ = self.read(ids)
        agrees = torch.zeros(*ids.shape, self.steps, dtype=torch.bool, device=ids.device)
        for step, normed in enumerate(self.unrolled(features, ids)):
            following = ids[:, step + 2 :]
            rows = following.shape[1]
            proposed = self.kept[self.output(normed[:, :rows]).argmax(-1)]
            agrees[:, 1 : rows + 1, step] = proposed == following  # the chain at row c drafts after token c + 1
        return agrees

    def read(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the head's features for a text, and the target's last hidden states, both [B, S, H]."""
        (target,) = self._target
        with torch.no_grad(), entering(target, self.mixer.ids) as entered:
            hidden = target.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return self.mixer([each.to(self.mixer.fc.weight.dtype) for each in entered]), hidden

    def unrolled(self, features: torch.Tensor, ids: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the normed hidden states [B, S - 1 - s, H] of each draft step s; a chain begins at every row."""
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
        own = {name: each.to(self._stored) if each.is_floating_point() else each for name, each in own.items()}
        stored = {name.replace(LAYERS, self._first, 1): each.cpu().contiguous() for name, each in own.items()}
        (folder / "config.json").write_text(json.dumps(self._config, indent=2) + "\n", encoding="utf-8")
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
