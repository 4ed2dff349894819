"""GGUF files of tiny models, written as llama.cpp's converters write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from outrider.tests.export import quantized
from outrider.tests.support import END, tokenizer

LENGTH = 128
SIZES: dict[str, Any] = {
    "context_length": LENGTH,
    "embedding_length": 64,
    "block_count": 2,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
    "vocab_size": 320,
}


def writer_of(
    path: Path, architecture: str, metadata: dict[str, Any], ends: dict[str, int], renamed: dict[int, str] | None = None
) -> gguf.GGUFWriter:
    """A writer of a tiny model's file, which has what llama.cpp's converters write, with other texts of some tokens."""
    writer, made = gguf.GGUFWriter(str(path), architecture), json.loads(tokenizer().to_str())
    writer.add_name("tiny")
    for key, value in metadata.items():
        add: dict[type, Any] = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        add.get(type(value), writer.add_array)(f"{architecture}.{key}", value)
    vocabulary = sorted(made["model"]["vocab"], key=made["model"]["vocab"].__getitem__)
    vocabulary = [(renamed or {}).get(at, token) for at, token in enumerate(vocabulary)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([gguf.TokenType.CONTROL if token == END else gguf.TokenType.NORMAL for token in vocabulary])
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in made["model"]["merges"]])
    for name, token in ends.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    return writer


def write(
    path: Path,
    metadata: dict[str, Any] | None = None,
    ends: dict[str, int] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    rope: dict[str, Any] | None = None,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    width: int = 64,
) -> Qwen2ForCausalLM:
    """Write a tiny Qwen2, with more metadata and tensors, and return the model in transformers, with its rotary embedding.

    Its matrices have the type `kind`, and random numbers if `gguf` cannot quantize to it.
    """
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=320,
        hidden_size=width,
        intermediate_size=max(SIZES["feed_forward_length"], width),
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0} | (rope or {}),
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():  # so that positions matter
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            parameter.data *= 20
    sizes = SIZES | {"embedding_length": width, "feed_forward_length": config.intermediate_size} | (metadata or {})
    writer = writer_of(path, "qwen2", sizes, {"eos": 0} if ends is None else ends)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, 2)
    for name, tensor in model.state_dict().items():
        base, own = name.rsplit(".", 1)
        numbers, stored = tensor.numpy().astype(np.float32), kind if tensor.dim() > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{names.get_name(base)}.{own}", quantized.blocks(numbers, stored), raw_dtype=stored)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    finish(writer)
    return model


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
