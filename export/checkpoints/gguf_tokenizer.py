"""Make the tokenizer that transformers reads from a GGUF file agree with the file, or refuse the file by the key's name.

The package `gguf` defines the keys; llama.cpp's `llama-vocab.cpp` defines their meaning (`llama_vocab::impl::load` and the
expressions of `llm_tokenizer_bpe`).
"""

from __future__ import annotations

from typing import Any

from tokenizers import models, pre_tokenizers

from outrider.errors import UnsupportedModelError
from outrider.export.checkpoints.gguf_file import AGAIN, GgufFile

START = "tokenizer."
TEXTS = f"{START}chat_template", f"{START}huggingface.", f"{START}rwkv.world"  # for other readers, or read with the template
BYTE_PAIRS, SENTENCEPIECE = "gpt2", "llama"  # values of tokenizer.ggml.model
# Keys that transformers, this module or another part of `export` reads; and keys for tasks other than generation.
READ = {
    *("model", "pre", "tokens", "scores", "token_type", "merges", "precompiled_charsmap", "remove_extra_whitespaces"),
    *("add_bos_token", "add_eos_token", "add_space_prefix", "bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id"),
    *("unknown_token_id", "padding_token_id"),
}
UNUSED = {
    *("token_type_count", "cls_token_id", "mask_token_id", "separator_token_id", "seperator_token_id", "add_sep_token"),
    *("prefix_token_id", "suffix_token_id", "middle_token_id"),
    *(f"fim_{each}_token_id" for each in ("pre", "suf", "mid", "pad", "rep", "sep")),
}
# Values of tokenizer.ggml.pre that split texts as GPT-2 does, and values that first split off each digit.
AS_GPT2 = {
    *("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "mpt", "olmo", "jais", "trillion", "granite-docling"),
    *("jina-es", "jina-de", "jina-v1-en", "jina-v2-code", "jina-v2-es", "jina-v2-de", "roberta-bpe"),
}
DIGITS_FIRST = {"starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"}
# Values with a first token even if the file does not say so, whose tokens need no merges.
AS_LLAMA3 = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}


def amend_tokenizer(file: GgufFile, tokenizer: Any) -> None:
    """Make the tokenizer that transformers read from the file split and begin texts as the file says.

    Raises:
        UnsupportedModelError: the file has a value that the tokenizer cannot have.
    """
    said = {key.removeprefix(f"{START}ggml."): value for key, value in file.metadata.items() if key.startswith(START)}
    for name, value in said.items():
        if name not in READ | UNUSED and not name.startswith(TEXTS):
            raise _unknown(file, name, value)
    backend = tokenizer.backend_tokenizer
    if said.get("model") == BYTE_PAIRS:
        pre = str(said.get("pre"))
        if pre in AS_LLAMA3:
            backend.model.ignore_merges = True
            if "add_bos_token" not in said and tokenizer.bos_token is not None:
                tokenizer.add_bos_token = True
                tokenizer.update_post_processor()
        elif pre in AS_GPT2 | DIGITS_FIRST:
            digits = [pre_tokenizers.Digits(individual_digits=True)] if pre in DIGITS_FIRST else []
            backend.pre_tokenizer = pre_tokenizers.Sequence([*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        elif not isinstance(backend.pre_tokenizer, pre_tokenizers.Sequence):  # transformers does not know it
            raise _unknown(file, "pre", pre)
    if said.get("model") == SENTENCEPIECE and isinstance(backend.model, models.BPE):
        prefix = bool(said.get("add_space_prefix", True))
        if _begins_with_space(backend) != prefix:
            raise _unknown(file, "add_space_prefix", prefix)


def _begins_with_space(backend: Any) -> bool:
    """Return whether a tokenizer adds a space before a text."""
    text = "x" if backend.normalizer is None else backend.normalizer.normalize_str("x")
    pieces = [text] if backend.pre_tokenizer is None else [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    return "".join(pieces) != "x"


def _unknown(file: GgufFile, name: str, value: object) -> UnsupportedModelError:
    return UnsupportedModelError(f"{file.name} has {START}ggml.{name} = {str(value)[:80]}, which outrider does not know", AGAIN)
