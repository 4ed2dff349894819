#!/usr/bin/env python3
"""Train a target of the shape of Qwen3.5, with its MTP head, on the texts of the shipped pair.

    python examples/tiny-hybrid/train.py --corpora DIR

Writes the checkpoint beside this script, in fp16: three layers of four are gated delta nets. DIR is that of
`examples/tiny-pair/train.py`, whose tokenizer it takes. Needs `outrider[export]`; two cores take half an hour.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.cache_utils import DynamicCache

from outrider.export.heads.mtp import MtpHead

HERE = Path(__file__).resolve().parent
PAIR = HERE.parent / "tiny-pair"
sys.path.insert(0, str(PAIR))
import train as pair  # noqa: E402

CONTEXT, BATCH = 160, 24
PEAK_RATE = 4e-3
DRAFT_STEPS = 2  # of the head in training
SHAPE = {
    "vocab_size": pair.VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}


def models() -> tuple[Qwen3_5ForCausalLM, MtpHead]:
    """Return a target and its head, which shares the target's embedding and output head, with fresh weights."""
    torch.manual_seed(0)
    target = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHAPE, num_hidden_layers=4))
    layer = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHAPE, num_hidden_layers=1, layer_types=["full_attention"]))
    layer.model.embed_tokens, layer.lm_head = target.model.embed_tokens, target.lm_head
    width = SHAPE["hidden_size"]
    zeros = torch.zeros(width)  # the norms of this family multiply by 1 + w
    tensors = {"enorm.weight": zeros, "hnorm.weight": zeros.clone(), "eh_proj.weight": torch.randn(width, 2 * width) * 0.05}
    head = MtpHead(layer, tensors)
    head.requires_grad_(True)
    return target, head


def losses(target: Qwen3_5ForCausalLM, head: MtpHead, rows: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the cross-entropy of the target over int64 [B, S + 1] rows, and that of each draft step of the head.

    In the first step row i takes the target's hidden state i and the token i + 1; in the next one, what the first has made for
    row i - 1.
    """
    hidden = target.model(rows[:, :-1]).last_hidden_state
    own = F.cross_entropy(target.lm_head(hidden).float().flatten(0, 1), rows[:, 1:].flatten())
    drafted, features = [], hidden[:, :-1].detach()
    positions = torch.arange(features.shape[1])[None]
    for step in range(DRAFT_STEPS):
        logits, features = head(rows[:, 1:-1], features, positions, DynamicCache())
        drafted.append(F.cross_entropy(logits[:, step:].float().flatten(0, 1), rows[:, 2 + step :].flatten()))
        features = F.pad(features, (0, 0, 1, 0))[:, :-1]
    return own, drafted


def train(corpora: Path, updates: int) -> tuple[Qwen3_5ForCausalLM, MtpHead]:
    """Train both at once with AdamW: warm-up, then cosine decay to a tenth."""
    (HERE / "work").mkdir(exist_ok=True)
    shutil.copy(PAIR / "target" / "tokenizer.json", HERE / "work")
    pair.CONTEXT, pair.BATCH = CONTEXT, BATCH
    data = pair.streams(corpora, HERE / "work")
    shutil.rmtree(HERE / "work")
    target, head = models()
    parameters = list({id(each): each for each in [*target.parameters(), *head.parameters()]}.values())
    print(f"{sum(each.numel() for each in parameters):,} parameters", flush=True)
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    started = time.monotonic()
    for update, rows in enumerate(pair.batches(data, updates)):
        rate = PEAK_RATE * min((update + 1) / 50, 0.1 + 0.45 * (1 + math.cos(math.pi * update / updates)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        own, drafted = losses(target, head, rows)
        (own + sum(0.3 * each for each in drafted)).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if update % 25 == 0 or update == updates - 1:
            speed = (update + 1) * BATCH * CONTEXT / (time.monotonic() - started)
            steps = ", ".join(f"{each.item():.3f}" for each in drafted)
            print(f"update {update}/{updates} loss {own.item():.3f}, drafts {steps}; {speed:,.0f} tokens/s", flush=True)
    return target, head


def write(target: Qwen3_5ForCausalLM, head: MtpHead, folder: Path) -> None:
    """Write the checkpoint as Qwen's are: the head's tensors are called `mtp.`, and transformers ignores them."""
    target.half().save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    names = {"eh_proj.weight": "mtp.fc.weight", "enorm.weight": "mtp.pre_fc_norm_embedding.weight"}
    names |= {"hnorm.weight": "mtp.pre_fc_norm_hidden.weight", "model.norm.weight": "mtp.norm.weight"}
    for name, tensor in head.half().state_dict().items():
        if not name.startswith(("lm_head.", "model.embed_tokens.")):
            tensors[names.get(name, name.replace("model.layers.", "mtp.layers."))] = tensor.contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PAIR / "target" / name, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpora", type=Path, required=True)
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("-o", "--output", type=Path, default=HERE / "target")
    options = parser.parse_args()
    write(*train(options.corpora, options.updates), options.output)
    print(json.dumps(json.loads((options.output / "config.json").read_text())["layer_types"]))


if __name__ == "__main__":
    main()
