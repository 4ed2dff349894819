#!/usr/bin/env python3
"""Train an EAGLE-3 draft head for the shipped target, on the target's own greedy answers.

    python examples/tiny-pair/train_head.py --corpora DIR

Writes `head/` beside this script, in the format of SafeAILab/EAGLE. DIR is that of `train.py`. Needs `outrider[export]`; two
cores take 13 minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from train import HERE, STYLES, VOCABULARY, documents, split
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

HEAD = HERE / "head"
DRAFT_VOCABULARY = 2048
STEPS = 4  # of a chain of drafted tokens
PROMPT, ANSWER = (20, 80), 176  # tokens of a prompt; of prompt and answer
ANSWER_BATCHES, ANSWER_ROWS = 48, 64
UPDATES, ROWS = 2000, 4  # answers of an update
PEAK_RATE = 2e-3
LATER_WEIGHT = 0.8  # of each draft step's loss, against the step before


class Attention(nn.Module):
    """Grouped-query attention over the rows that have real features, and over the drafted rows of each row's own chain."""

    def __init__(self, shape: LlamaConfig) -> None:
        super().__init__()
        self.size, self.groups = shape.head_dim, shape.num_attention_heads // shape.num_key_value_heads
        width, narrow = shape.num_attention_heads * self.size, shape.num_key_value_heads * self.size
        self.q_proj = nn.Linear(2 * shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden_size, narrow, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden_size, narrow, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(
        self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], cache: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """Attend from [B, R, 2H] rows, one per chain, and add their keys and values to the cache: one entry per step."""
        batch, rows, _ = x.shape
        query, key, value = (
            project(x).view(batch, rows, -1, self.size).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query * self.size**-0.5, key, *rotary)
        cache.append((key.repeat_interleave(self.groups, 1), value.repeat_interleave(self.groups, 1)))
        (keys, values), *own = [(key[:, :, :rows], value[:, :, :rows]) for key, value in cache]
        later = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        scores = [(query @ keys.transpose(2, 3)).masked_fill(later, -torch.inf)]
        scores += [(query * key).sum(-1, keepdim=True) for key, _ in own]
        weights = torch.cat(scores, -1).softmax(-1).to(values.dtype)
        mixed = weights[..., :rows] @ values
        for index, (_, value) in enumerate(own):
            mixed = mixed + weights[..., rows + index, None] * value
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """The decoder layer, whose attention reads the embedding beside the hidden state."""

    def __init__(self, shape: LlamaConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(shape), LlamaMLP(shape)
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm = (
            LlamaRMSNorm(shape.hidden_size, shape.rms_norm_eps) for _ in range(3)
        )


class Head(nn.Module):
    """The head, with modules named like a checkpoint's tensors. `kept` are the ids of the draft vocabulary, ascending."""

    def __init__(self, shape: LlamaConfig, kept: torch.Tensor) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = Layer(shape)
        self.norm = LlamaRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, len(kept), bias=False)
        self.register_buffer("d2t", kept - torch.arange(len(kept)))
        self.register_buffer("t2d", torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, kept, True))
        self.kept, self.rotary = kept, LlamaRotaryEmbedding(shape)

    def forward(self, target: LlamaForCausalLM, features: torch.Tensor, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the logits of each draft step for chains that begin at every row.

        Step s of the chain at row c reads token c + s + 1 at position c + s, and predicts token c + s + 2. Features are
        [B, S, 3H], tokens [B, S], the logits of step s [B, S - 1 - s, Vd].
        """
        layer, cache = self.midlayer, []
        hidden = self.fc(features)
        for step in range(STEPS):
            rows = tokens.shape[1] - 1 - step
            hidden = hidden[:, :rows]
            embedding = layer.input_layernorm(target.get_input_embeddings()(tokens[:, step + 1 :]))
            x = torch.cat((embedding, layer.hidden_norm(hidden)), -1)
            hidden = hidden + layer.self_attn(x, self.rotary(x, torch.arange(step, step + rows)[None]), cache)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            yield self.lm_head(self.norm(hidden))


def configuration() -> dict[str, object]:
    """Return the head's config.json: the target's shapes, with one layer."""
    target = json.loads((HERE / "target" / "config.json").read_text(encoding="utf-8"))
    theta = target["rope_parameters"]["rope_theta"]
    for key in ("dtype", "rope_parameters", "pretraining_tp", "transformers_version"):
        del target[key]
    one = {"num_hidden_layers": 1, "draft_vocab_size": DRAFT_VOCABULARY, "tie_word_embeddings": False}
    return target | one | {"rope_theta": theta, "torch_dtype": "float16"}


@torch.no_grad()
def read(target: LlamaForCausalLM, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what enters the target's layers 2, n // 2 and n - 3, side by side, and its logits."""
    result = target(tokens, output_hidden_states=True, use_cache=False)
    count = target.config.num_hidden_layers
    return torch.cat([result.hidden_states[layer] for layer in (2, count // 2, count - 3)], -1), result.logits


def load_target() -> LlamaForCausalLM:
    """Return the target in fp32, made to continue past the end of a text."""
    target = LlamaForCausalLM.from_pretrained(HERE / "target", dtype=torch.float32).eval().requires_grad_(False)
    target.generation_config.update(eos_token_id=None, pad_token_id=0, do_sample=False)
    return target


@torch.no_grad()
def answers(target: LlamaForCausalLM, corpora: Path) -> torch.Tensor:
    """Return int64 [N, ANSWER]: beginnings of training documents, of various lengths, and the target's greedy answers."""
    tokenizer = Tokenizer.from_file(str(HERE / "target" / "tokenizer.json"))
    texts = {style: [e.ids for e in tokenizer.encode_batch(split(documents(corpora, style))[0])] for style in STYLES}
    random, started, result = torch.Generator().manual_seed(2), time.monotonic(), []
    for batch in range(ANSWER_BATCHES):
        length = int(torch.randint(*PROMPT, (1,), generator=random))
        prompts = []
        for style, share in STYLES.items():
            long = [ids[:length] for ids in texts[style] if len(ids) > length]
            prompts += [long[i] for i in torch.randint(len(long), (round(share * ANSWER_ROWS),), generator=random).tolist()]
        ids = torch.tensor(prompts)
        result.append(target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER - length))
        if batch % 8 == 7:
            print(f"answers {batch + 1}/{ANSWER_BATCHES} {time.monotonic() - started:.0f} s", flush=True)
    return torch.cat(result)


def new_head(target: LlamaForCausalLM, kept: torch.Tensor) -> Head:
    """Return a head that begins with the target's last layer, norm and rows of lm_head; the embedding has no part in it yet."""
    torch.manual_seed(0)
    head, last = Head(LlamaConfig(**configuration()), kept), target.model.layers[-1]
    head.norm.load_state_dict(target.model.norm.state_dict())
    head.lm_head.load_state_dict({"weight": target.lm_head.weight[kept]})
    for name in ("mlp", "post_attention_layernorm", "self_attn.o_proj"):
        head.midlayer.get_submodule(name).load_state_dict(last.get_submodule(name).state_dict())
    head.midlayer.hidden_norm.load_state_dict(last.input_layernorm.state_dict())
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = last.self_attn.get_submodule(name).weight
        head.midlayer.self_attn.get_submodule(name).load_state_dict(
            {"weight": torch.cat((weight.new_zeros(weight.shape), weight), 1)}
        )
    return head


def train(corpora: Path) -> None:
    """Train with AdamW: warm-up, then cosine decay to a twentieth. Write the head.

    The loss is the cross-entropy with the target's distribution over the draft vocabulary, in all steps of the chains that
    begin at every row.
    """
    target = load_target()
    answered = answers(target, corpora)
    counts = answered.flatten().bincount(minlength=VOCABULARY)
    counts[target.config.eos_token_id] = counts.sum()
    head = new_head(target, counts.topk(DRAFT_VOCABULARY).indices.sort().values)
    covered = head.t2d[answered].float().mean()
    print(f"{sum(p.numel() for p in head.parameters()):,} parameters; the vocabulary covers {covered:.2%}", flush=True)
    optimizer = torch.optim.AdamW(head.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    random, order = torch.Generator().manual_seed(3), torch.tensor([], dtype=torch.int64)
    started, sums = time.monotonic(), torch.zeros(STEPS)
    for update in range(UPDATES):
        if len(order) < ROWS:
            order = torch.randperm(len(answered), generator=random)
        tokens, order = answered[order[:ROWS]], order[ROWS:]
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * min((update + 1) / 50, 0.05 + 0.475 * (1 + math.cos(math.pi * update / UPDATES)))
        with torch.autocast("cpu", torch.bfloat16):
            features, goal = read(target, tokens)
            goal = goal[..., head.kept].float().softmax(-1)
            losses = [
                nn.functional.cross_entropy(logits.float().flatten(0, 1), goal[:, step + 1 :].flatten(0, 1))
                for step, logits in enumerate(head(target, features, tokens))
            ]
        torch.stack([LATER_WEIGHT**step * loss for step, loss in enumerate(losses)]).sum().backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        sums += torch.stack(losses).detach()
        if update % 100 == 99:
            means = " ".join(f"{each / 100:.3f}" for each in sums.tolist())
            print(f"update {update + 1}/{UPDATES} loss by step {means} {time.monotonic() - started:.0f} s", flush=True)
            sums.zero_()
    HEAD.mkdir(exist_ok=True)
    (HEAD / "config.json").write_text(json.dumps(configuration(), indent=2) + "\n", encoding="utf-8")
    tensors = {name: each.half() if each.is_floating_point() else each for name, each in head.state_dict().items()}
    save_file(tensors, HEAD / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpora", type=Path, required=True)
    train(parser.parse_args().corpora)


if __name__ == "__main__":
    main()
