"""Writes drafts and targets with random weights, to measure their costs.

`python -m outrider.experiments.random_weights model|draft|head|hybrid`; each has --help.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import click
import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.core_model_loading import revert_weight_conversion

from outrider.export.checkpoints.checkpoint import read_config
from outrider.export.checkpoints.source import Source

# Shapes of Qwen3.5: hidden size, feed-forward width, attention heads, key/value heads, key and value heads of the delta nets.
SHAPES = {"0.8B": (1024, 3584, 8, 2, 16, 16), "4B": (2560, 9216, 16, 4, 16, 32)}

# Layers, widths and vocabularies of published models. The mixture has 16 of its 128 experts.
_QWEN = {"rms_norm_eps": 1e-6, "max_position_embeddings": 40_960, "rope_theta": 1e6, "tie_word_embeddings": False}
_QWEN |= {"num_key_value_heads": 8, "num_attention_heads": 32, "head_dim": 128, "vocab_size": 151_936}
MODELS: dict[str, PreTrainedConfig] = {
    "Qwen3-8B": Qwen3Config(hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, **_QWEN),
    "Llama-3.1-8B": LlamaConfig(
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128_256,
        max_position_embeddings=8192,
        rope_theta=5e5,
    ),
    "Gemma-3-4B": Gemma3TextConfig(
        hidden_size=2560,
        intermediate_size=10_240,
        num_hidden_layers=34,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        vocab_size=262_208,
        sliding_window=1024,
    ),
    "Qwen3-30B-A3B": Qwen3MoeConfig(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_experts=16,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        **_QWEN | {"num_key_value_heads": 4},
    ),
}
SHARD = 2**31  # bytes

out = click.argument("out", type=click.Path(path_type=Path))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Write checkpoints with random weights."""
    torch.manual_seed(0)


@main.command()
@click.argument("shape", type=click.Choice(list(MODELS)))
@click.argument("tokenizer")
@out
@click.option("--layers", type=int, help="The number of layers.  [default: the published model's]")
def model(shape: str, tokenizer: str, out: Path, layers: int | None) -> None:
    """Write a checkpoint in bf16 with the shape of a published model, shard by shard; TOKENIZER is a Hugging Face folder."""
    config = copy.deepcopy(MODELS[shape])
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    config.eos_token_id = loaded.eos_token_id
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shapes = {name: each for name, each in outline.state_dict().items() if name not in outline.all_tied_weights_keys}
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, each in revert_weight_conversion(outline, shapes).items():
        if sum(other.nbytes for other in shards[-1].values()) + each.nbytes > SHARD and shards[-1]:
            shards.append({})
        shards[-1][name] = each
    out.mkdir(parents=True)
    places = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        places.update(dict.fromkeys(shard, file))
        # The scale keeps hidden states near one. Norms and biases have one dimension.
        made = {name: torch.randn(each.shape, dtype=torch.bfloat16) * each.shape[-1] ** -0.5 for name, each in shard.items()}
        made |= {name: torch.ones_like(made[name]) for name, each in shard.items() if each.dim() == 1}
        save_file(made, out / file, metadata={"format": "pt"})
        print(f"{file}: {sum(each.nbytes for each in made.values()):,} bytes")
    index = {"metadata": {"total_size": sum(each.nbytes for shard in shards for each in shard.values())}, "weight_map": places}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    config.architectures = [type(outline).__name__]
    config.save_pretrained(out)
    loaded.save_pretrained(out)


@main.command()
@click.argument("like")
@out
def draft(like: str, out: Path) -> None:
    """Write a draft with the shape and tokenizer of LIKE, a Hugging Face folder or hub id."""
    # Untied, because even a random model tends to repeat the last token if its weights are tied.
    config = AutoConfig.from_pretrained(like, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(like).save_pretrained(out)


@main.command()
@click.argument("target")
@out
@click.option("--draft-vocab", type=int, default=32_000, show_default=True, help="Number of tokens that the head can propose.")
def head(target: str, out: Path, draft_vocab: int) -> None:
    """Write an EAGLE-3 head in SafeAILab's format with the shapes of TARGET, given as for `outrider export --target`."""
    config = read_config(Source.parse(target))
    hidden, inner = config.hidden_size, config.intermediate_size
    width = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    query, key = config.num_attention_heads * width, config.num_key_value_heads * width
    shapes = {
        "fc": (hidden, 3 * hidden),
        **{f"midlayer.self_attn.{name}_proj": (rows, 2 * hidden) for name, rows in {"q": query, "k": key, "v": key}.items()},
        "midlayer.self_attn.o_proj": (hidden, query),
        **{f"midlayer.mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")},
        "midlayer.mlp.down_proj": (hidden, inner),
        "lm_head": (draft_vocab, hidden),
    }
    tensors = {f"{name}.weight": torch.randn(shape, dtype=torch.bfloat16) * shape[1] ** -0.5 for name, shape in shapes.items()}
    for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    tensors["d2t"] = torch.zeros(draft_vocab, dtype=torch.int64)
    copied = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "vocab_size")
    fields = {name: getattr(config, name) for name in copied}
    fields |= {"model_type": "llama", "num_hidden_layers": 1, "head_dim": width, "draft_vocab_size": draft_vocab}
    out.mkdir(parents=True)
    save_file(tensors, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


@main.command()
@click.argument("tokenizer")
@out
@click.option("--like", type=click.Choice(list(SHAPES)), default="0.8B", show_default=True)
@click.option("--layers", type=int, default=24, show_default=True)
def hybrid(tokenizer: str, out: Path, like: str, layers: int) -> None:
    """Write OUT/hybrid, shaped like a Qwen3.5, and OUT/dense with as many parameters; TOKENIZER is a Hugging Face folder."""
    hidden, inner, heads, narrow_heads, key_heads, value_heads = SHAPES[like]
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    common = {
        "vocab_size": AutoConfig.from_pretrained(tokenizer).vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": narrow_heads,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "eos_token_id": loaded.eos_token_id,
    }
    config = Qwen3_5TextConfig(
        **common,
        intermediate_size=inner,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    )
    narrow, wide = (parameters(Qwen3Config(**common, intermediate_size=width)) for width in (1024, 2048))
    width = round((1024 + 1024 * (parameters(config) - narrow) / (wide - narrow)) / 64) * 64
    for name, each in (("hybrid", config), ("dense", Qwen3Config(**common, intermediate_size=width))):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(each, dtype=torch.float32)
        print(f"{name}: {model.num_parameters():,} parameters")
        model.save_pretrained(out / name)
        loaded.save_pretrained(out / name)


def parameters(config: PreTrainedConfig) -> int:
    """Return the number of parameters, without allocating them."""
    with torch.device("meta"):
        return int(AutoModelForCausalLM.from_config(copy.deepcopy(config)).num_parameters())


if __name__ == "__main__":
    main(prog_name="random_weights")
