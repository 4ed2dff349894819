"""A pair of random weights in the shape of Qwen2.5 7B and 0.5B."""

from __future__ import annotations

import shutil
from pathlib import Path

ACCEPTANCE = 0.8  # of this pair, which would never agree by itself
SHAPES = {
    "target": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "draft": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
}


def write_large_pair(folder: Path, tokenizer: Path) -> None:
    """Write the checkpoints `target` and `draft` in fp16, with the tokenizer of the checkpoint `tokenizer`."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    default = torch.get_default_dtype()
    for role, shape in SHAPES.items():
        config = Qwen2Config(
            vocab_size=152064,
            max_position_embeddings=4096,
            tie_word_embeddings=role == "draft",
            bos_token_id=None,
            eos_token_id=None,
            **shape,
        )
        torch.set_default_dtype(torch.float16)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = Qwen2ForCausalLM(config)
        torch.set_default_dtype(default)
        model.cpu().save_pretrained(folder / role)
        del model
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(tokenizer / name, folder / role / name)
