"""The tokenizer of a GGUF file splits and begins texts as llama.cpp does, or the file is refused by the key's name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer

from outrider.errors import UnsupportedModelError
from outrider.export.checkpoints.source import Source
from outrider.export.checkpoints.tokenizer import load_tokenizer
from outrider.tests.export.gguf_files import SIZES, finish, writer_of

TEXT = "It's 2026, and 12345 x's cost  $40.50!\n\n  Ärger mit 99%"
GPT2 = [
    "It",
    "'s",
    " 2026",
    ",",
    " and",
    " 12345",
    " x",
    "'s",
    " cost",
    " ",
    " $",
    "40",
    ".",
    "50",
    "!",
    "\n\n ",
    " Ärger",
    " mit",
    " 99",
    "%",
]
# As llama.cpp's expressions cut it.
PIECES = {
    "gpt-2": GPT2,
    "olmo": GPT2,
    "smollm": [
        *("It", "'s", " ", "2", "0", "2", "6", ",", " and", " ", "1", "2", "3", "4", "5", " x", "'s", " cost", " ", " $", "4"),
        *("0", ".", "5", "0", "!", "\n\n ", " Ärger", " mit", " ", "9", "9", "%"),
    ],
    "llama-bpe": [
        *("It", "'s", " ", "202", "6", ",", " and", " ", "123", "45", " x", "'s", " cost", " ", " $", "40", ".", "50", "!\n\n"),
        *(" ", " Ärger", " mit", " ", "99", "%"),
    ],
}


def made(tmp_path: Path, pre: str = "qwen2", **more: Any) -> Tokenizer:
    """Write a file, and return the tokenizer that is exported of it."""
    writer = writer_of(tmp_path / "m.gguf", "qwen2", SIZES, {"eos": 3, "bos": 2})
    writer.kv_data[0]["tokenizer.ggml.pre"].value = pre
    for key, value in more.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32 if isinstance(value, int) else writer.add_string
        add(f"tokenizer.ggml.{key}", value)
    finish(writer)
    return Tokenizer.from_str(load_tokenizer(Source.parse(str(tmp_path / "m.gguf"))).json)


@pytest.mark.parametrize("pre", PIECES)
def test_text_is_cut_as_the_file_says(pre: str, tmp_path: Path) -> None:
    cut = made(tmp_path, pre).pre_tokenizer.pre_tokenize_str(TEXT)
    assert [TEXT[begin:end] for _, (begin, end) in cut] == PIECES[pre]


@pytest.mark.parametrize(
    ("pre", "more", "begins"),
    [
        ("qwen2", {}, False),
        ("qwen2", {"add_bos_token": True}, True),
        ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
    ],
)
def test_text_begins_as_the_file_says(pre: str, more: dict[str, Any], begins: bool, tmp_path: Path) -> None:
    encoded = made(tmp_path, pre, **more).encode("the").ids
    assert (encoded[0] == 2) == begins


@pytest.mark.parametrize(
    ("pre", "more", "named"),
    [
        ("of-tomorrow", {}, "tokenizer.ggml.pre = of-tomorrow"),
        ("default", {}, "tokenizer.ggml.pre = default"),
        ("qwen2", {"escape_whitespaces": False}, "tokenizer.ggml.escape_whitespaces = False"),
    ],
)
def test_what_is_not_known_is_refused_by_name(pre: str, more: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=re.escape(named)):
        made(tmp_path, pre, **more)


def test_what_only_other_tasks_need_changes_nothing(tmp_path: Path) -> None:
    assert made(tmp_path, fim_pre_token_id=5, token_type_count=1).encode("the").ids == made(tmp_path).encode("the").ids


@pytest.mark.parametrize(("prefix", "refused"), [(None, False), (True, False), (False, True)])
def test_the_space_before_a_sentencepiece_text(prefix: bool | None, refused: bool, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_tokenizer_model("llama")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{at:02X}>" for at in range(256)), "\u2581", "x", "\u2581x"]
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(at) for at in range(len(tokens))])
    writer.add_token_types([2, 3, 3, *[6] * 256, 1, 1, 1])
    for key, value in SIZES.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"llama.{key}", value)
    if prefix is not None:
        writer.add_add_space_prefix(prefix)
    finish(writer)
    source = Source.parse(str(tmp_path / "m.gguf"))
    if refused:
        with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.add_space_prefix = False"):
            load_tokenizer(source)
    else:
        assert Tokenizer.from_str(load_tokenizer(source).json).encode("x", add_special_tokens=False).tokens == ["\u2581x"]
