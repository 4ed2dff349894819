"""Checkpoints of drafts made by code: a parallel draft, and random heads for the pair's target."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from outrider.export.heads.short_head import frequent_tokens
from outrider.tests.support import PAIR, SHIPPED


def parallel_draft(folder: Path) -> Path:
    """The checkpoint of a parallel draft: the pair's draft, which was not trained to read masks."""
    shutil.copytree(PAIR / "draft", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pard_token": config["vocab_size"] - 1}))
    return folder


WIDTH, HEADS, KEPT, VOCABULARY = 96, (3, 1), 32, 1024  # of the pair's target: HEADS of queries and of keys


def random_head(folder: Path, tokens: int = 16) -> Path:
    """The checkpoint of a random EAGLE-3 head for the pair's target, which proposes the `tokens` most frequent ones."""
    width, heads, kept, vocabulary = WIDTH, HEADS, KEPT, VOCABULARY
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn((rows, columns), generator=generator) / math.sqrt(columns)

    attention = {"q_proj": heads[0], "k_proj": heads[1], "v_proj": heads[1]}
    tensors = {f"midlayer.self_attn.{name}.weight": matrix(kept * count, 2 * width) for name, count in attention.items()}
    tensors |= {f"midlayer.mlp.{name}_proj.weight": matrix(width, width) for name in ("gate", "up", "down")}
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    tensors |= {f"midlayer.{name}.weight": torch.ones(width) for name in norms} | {"norm.weight": torch.ones(width)}
    tensors |= {"midlayer.self_attn.o_proj.weight": matrix(width, width), "fc.weight": matrix(width, 3 * width)}
    tensors["lm_head.weight"] = 3 * matrix(tokens, width)
    json_text = (PAIR / "target" / "tokenizer.json").read_text()
    frequent = frequent_tokens(json_text, SHIPPED / "heldout.jsonl", tokens, vocabulary, [])
    tensors["d2t"] = frequent - torch.arange(tokens)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": width,
        "num_hidden_layers": 1,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocabulary,
        "head_dim": kept,
        "draft_vocab_size": tokens,
        "rms_norm_eps": 1e-5,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1], "use_aux_hidden_state": True},
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def random_parallel_head(folder: Path) -> Path:
    """The checkpoint of a random P-EAGLE head for the pair's target."""
    random_head(folder)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    outer = {"draft_vocab_size": config.pop("draft_vocab_size"), "architectures": ["PEagleDraftModel"]}
    config.pop("architectures"), config.pop("eagle_config")
    outer |= {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    outer |= {"speculators_model_type": "peagle", "mask_token_id": config["vocab_size"] - 1, "transformer_layer_config": config}
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    generator = torch.Generator().manual_seed(1)
    tensors["mask_hidden"] = torch.randn((1, 1, 3 * config["hidden_size"]), generator=generator)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(outer))
    return folder


def plain_block_head(folder: Path) -> Path:
    """The checkpoint of a random DFlash head, with a mask for every token and no heads of its own."""
    random_block_head(folder)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    for key in [key for key in config if "markov" in key or "confidence" in key]:
        del config[key]
    config |= {"speculators_model_type": "dflash", "architectures": ["DFlashDraftModel"], "sample_from_anchor": False}
    config["block_size"] += 1
    (folder / "config.json").write_text(json.dumps(config))
    own = ("markov_head.", "confidence_head.")
    save_file({name: each for name, each in tensors.items() if not name.startswith(own)}, folder / "model.safetensors")
    return folder


def random_block_head(folder: Path) -> Path:
    """The checkpoint of a random DSpark head for the pair's target, which proposes a few of the most frequent tokens."""
    random_head(folder)
    width, heads, kept, rank = WIDTH, HEADS, KEPT, 16
    given = load_file(folder / "model.safetensors")
    tensors = {name: given[name] for name in ("fc.weight", "norm.weight", "lm_head.weight", "d2t")}
    tensors["fc.weight"] = tensors["fc.weight"][:, : 2 * width].clone()  # of two layers, all that the target has
    tokens, generator = len(given["d2t"]), torch.Generator().manual_seed(2)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn((rows, columns), generator=generator) / math.sqrt(columns)

    attention = {"q_proj": heads[0], "k_proj": heads[1], "v_proj": heads[1]}
    for layer in ("layers.0", "layers.1"):
        tensors |= {f"{layer}.self_attn.{name}.weight": matrix(kept * count, width) for name, count in attention.items()}
        tensors |= {f"{layer}.self_attn.{name}.weight": torch.ones(kept) for name in ("q_norm", "k_norm")}
        tensors |= {f"{layer}.mlp.{name}_proj.weight": matrix(width, width) for name in ("gate", "up", "down")}
        tensors |= {f"{layer}.{name}.weight": torch.ones(width) for name in ("input_layernorm", "post_attention_layernorm")}
        tensors[f"{layer}.self_attn.o_proj.weight"] = matrix(width, width)
    tensors |= {
        "hidden_norm.weight": torch.ones(width),
        "markov_head.markov_w1.weight": 4 * matrix(VOCABULARY, rank),
        "markov_head.markov_w2.weight": 2 * matrix(tokens, rank),
        "confidence_head.proj.weight": matrix(1, width + rank),
        "confidence_head.proj.bias": torch.zeros(1),
    }
    layers = json.loads((folder / "config.json").read_text()) | {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "head_dim": kept,
    }
    outer = {"draft_vocab_size": layers.pop("draft_vocab_size"), "architectures": ["DSparkDraftModel"]}
    layers.pop("architectures"), layers.pop("eagle_config")
    config = outer | {
        "aux_hidden_state_layer_ids": [0, 1],
        "block_size": 8,
        "confidence_head_with_markov": True,
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
        "markov_rank": rank,
        "mask_token_id": VOCABULARY - 1,
        "sample_from_anchor": True,
        "speculators_model_type": "dspark",
        "transformer_layer_config": layers,
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
