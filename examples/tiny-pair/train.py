#!/usr/bin/env python3
"""Train the shipped pair: a 5.5 M target, then a 0.6 M draft distilled from the target's distribution.

    python examples/tiny-pair/train.py tokenizer --corpora DIR --work DIR
    python examples/tiny-pair/train.py target    --corpora DIR --work DIR --tokens 30e6
    python examples/tiny-pair/train.py draft     --corpora DIR --work DIR --tokens 30e6
    python examples/tiny-pair/train.py publish   --corpora DIR --work DIR
    python examples/tiny-pair/train.py texts     --corpora DIR --work DIR

`publish` writes both models in fp16 beside this script, and `heldout.jsonl`, the beginnings of held-out documents. `texts`
writes `texts.jsonl`, a mixture of training documents, for `outrider train-draft`.

DIR has stories, support, math and code as `NAME.jsonl.gz`, with one `{"text"}` object per line. The source of the Python
standard library is added to the code. Needs `outrider[export]` and a C++ compiler; two cores take under two hours.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent
STYLES = {"support": 0.3, "stories": 0.3, "math": 0.2, "code": 0.2}  # share of each batch
HELD_OUT = 40  # every 40th document is never trained on
CONTEXT = 512
BATCH = 16
VOCABULARY = 4096
STDLIB_BYTES = 3_000_000
PROMPTS, PROMPT_CHARACTERS = 20, 160  # of each style
TEXTS, TEXT_CHARACTERS = 3072, 500  # of all styles
END = "<|endoftext|>"
SHAPES = {
    "target": {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "draft": {
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
    },
}
PEAK_RATE = {"target": 2e-3, "draft": 4e-3}


def documents(corpora: Path, style: str) -> list[str]:
    """Return all documents of one style, in a fixed order."""
    with gzip.open(corpora / f"{style}.jsonl.gz", "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    return texts + standard_library() if style == "code" else texts


def standard_library() -> list[str]:
    """Return the top-level modules of the running Python, in pieces of about 2,000 characters, split between definitions."""
    pieces: list[str] = []
    total = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        piece = ""
        for block in path.read_text(encoding="utf-8", errors="ignore").split("\n\n"):
            piece += block + "\n\n"
            if len(piece) > 2000:
                pieces.append(piece.rstrip())
                piece = ""
        total += path.stat().st_size
        if total > STDLIB_BYTES:
            break
    return pieces


def split(texts: list[str]) -> tuple[list[str], list[str]]:
    """Split documents into training and held-out ones."""
    held = [text for index, text in enumerate(texts) if index % HELD_OUT == 0]
    return [text for index, text in enumerate(texts) if index % HELD_OUT], held


def train_tokenizer(corpora: Path, work: Path) -> None:
    """Train one byte-level BPE for both models. Digits are separate tokens, so that sums can be learned."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    texts = (text for style in STYLES for text in split(documents(corpora, style))[0])
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(work / "tokenizer.json"))


def streams(corpora: Path, work: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return (training, held-out) token streams by style, with documents separated by END."""
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    result = {}
    for style in STYLES:
        parts = []
        for texts in split(documents(corpora, style)):
            encoded = tokenizer.encode_batch([text + END for text in texts])
            parts.append(torch.from_numpy(np.concatenate([np.array(e.ids, dtype=np.int64) for e in encoded])))
        result[style] = (parts[0], parts[1])
        print(f"{style}: {len(parts[0]):,} training tokens, {len(parts[1]):,} held out", flush=True)
    return result


def new_model(role: str) -> LlamaForCausalLM:
    """Return a model of the shipped shape with fresh weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        **SHAPES[role],
    )
    return LlamaForCausalLM(config)


def batches(data: dict[str, tuple[torch.Tensor, torch.Tensor]], steps: int) -> Iterator[torch.Tensor]:
    """Yield int64 [BATCH, CONTEXT + 1] windows, with styles mixed by their share."""
    random = torch.Generator().manual_seed(1)
    names, shares = list(STYLES), torch.tensor(list(STYLES.values()))
    for _ in range(steps):
        rows = []
        for choice in torch.multinomial(shares, BATCH, replacement=True, generator=random).tolist():
            stream = data[names[choice]][0]
            start = int(torch.randint(len(stream) - CONTEXT - 1, (1,), generator=random))
            rows.append(stream[start : start + CONTEXT + 1])
        yield torch.stack(rows)


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, data: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> dict[str, float]:
    """Return the mean cross-entropy by style, in nats per token, over at most 32 windows of held-out text."""
    losses = {}
    for style, (_, stream) in data.items():
        count = min(32, (len(stream) - 1) // CONTEXT)
        windows = torch.stack([stream[i * CONTEXT : (i + 1) * CONTEXT + 1] for i in range(count)])
        total = 0.0
        for rows in windows.split(BATCH):
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(rows[:, :-1]).logits
            total += float(
                torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
            )
        losses[style] = round(total / (count * CONTEXT), 3)
    return losses


def training_loss(model: LlamaForCausalLM, teacher: LlamaForCausalLM | None, rows: torch.Tensor) -> torch.Tensor:
    """Return the mean loss per position of int64 [B, S + 1] rows: cross-entropy, or KL(teacher || model) with a teacher."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(rows[:, :-1]).logits.flatten(0, 1)
        if teacher is not None:
            with torch.no_grad():
                goal = teacher(rows[:, :-1]).logits.flatten(0, 1)
    if teacher is None:
        return torch.nn.functional.cross_entropy(logits.float(), rows[:, 1:].flatten())
    goal = goal.float().log_softmax(-1)
    return (goal.exp() * (goal - logits.float().log_softmax(-1))).sum(-1).mean()


def train(role: str, corpora: Path, work: Path, tokens: float) -> None:
    """Train a model with AdamW: warm-up, then cosine decay to a tenth.

    The draft's loss is its KL divergence from the target at temperature 1.
    """
    data = streams(corpora, work)
    model = new_model(role)
    teacher = LlamaForCausalLM.from_pretrained(work / "target").eval() if role == "draft" else None
    print(f"{role}: {model.num_parameters():,} parameters", flush=True)
    loss_of = torch.compile(lambda rows: training_loss(model, teacher, rows))

    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], betas=(0.9, 0.95), fused=True
    )
    steps = int(tokens / (BATCH * CONTEXT))
    started = time.monotonic()
    for step, rows in enumerate(batches(data, steps)):
        progress = step / steps
        rate = PEAK_RATE[role] * min((step + 1) / 100, 0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == steps - 1:
            speed = (step + 1) * BATCH * CONTEXT / (time.monotonic() - started)
            print(f"{role} step {step}/{steps} loss {loss.item():.3f} {speed:,.0f} tokens/s", flush=True)
        if step % 500 == 499 or step == steps - 1:
            print(f"{role} held out {held_out_loss(model, data)}", flush=True)
            model.save_pretrained(work / role)


def publish(corpora: Path, work: Path) -> None:
    """Write both models as fp16 safetensors beside this script, with the tokenizer, chat template and held-out prompts."""
    with open(HERE / "heldout.jsonl", "w", encoding="utf-8") as lines:
        for style in STYLES:
            held = [text for text in split(documents(corpora, style))[1] if len(text) > 2 * PROMPT_CHARACTERS]
            for text in held[:: max(1, len(held) // PROMPTS)][:PROMPTS]:
                prompt = text[:PROMPT_CHARACTERS].rsplit(maxsplit=1)[0]
                lines.write(json.dumps({"workload": style, "prompt": prompt}, ensure_ascii=False) + "\n")
    template = (HERE / "chat_template.jinja").read_text(encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    for role in SHAPES:
        folder = HERE / role
        LlamaForCausalLM.from_pretrained(work / role).to(torch.float16).save_pretrained(folder)
        (folder / "tokenizer.json").write_bytes((work / "tokenizer.json").read_bytes())
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def write_texts(corpora: Path, work: Path) -> None:
    """Write training documents of all styles by their share, in random order."""
    chosen: list[str] = []
    random = torch.Generator().manual_seed(2)
    for style, share in STYLES.items():
        texts = split(documents(corpora, style))[0]
        chosen += [texts[index] for index in torch.randperm(len(texts), generator=random)[: round(share * TEXTS)].tolist()]
    with open(work / "texts.jsonl", "w", encoding="utf-8") as lines:
        for index in torch.randperm(len(chosen), generator=random).tolist():
            lines.write(json.dumps({"text": chosen[index][:TEXT_CHARACTERS]}, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["tokenizer", "target", "draft", "publish", "texts"])
    parser.add_argument("--corpora", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tokens", type=float, default=30e6)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    if options.stage == "publish":
        publish(options.corpora, options.work)
    elif options.stage == "texts":
        write_texts(options.corpora, options.work)
    elif options.stage == "tokenizer":
        train_tokenizer(options.corpora, options.work)
    else:
        train(options.stage, options.corpora, options.work, options.tokens)


if __name__ == "__main__":
    main()
