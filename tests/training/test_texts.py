"""What a draft is trained on: which files are read, and which of their tokens are learned."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from outrider.bundle.folder import read_manifest
from outrider.errors import UsageError
from outrider.runtime.text import Text
from outrider.training.answers import given_examples, prompts_of
from outrider.training.texts import Message, Sample, read_texts

TURNS = [("user", "What is it?"), ("assistant", "A hotel in San Jose."), ("user", "Thanks."), ("assistant", "You are welcome.")]


@pytest.fixture(scope="module")
def text(shipped_bundle: Path) -> Text:
    return Text.load(shipped_bundle, read_manifest(shipped_bundle))


def test_files_of_every_kind(tmp_path: Path) -> None:
    lines = [{"prompt": "a", "workload": "w"}, {"text": "b"}, {"messages": [{"role": "user", "content": "c"}]}]
    content = "\n".join(json.dumps(line) for line in lines) + "\n\n"
    (tmp_path / "one.jsonl").write_text(content)
    (tmp_path / "two.jsonl.gz").write_bytes(gzip.compress(content.encode()))
    (tmp_path / "three.txt").write_text("d e f")
    wanted = [Sample(prompt="a"), Sample(text="b"), Sample(messages=[Message("user", "c")])]
    assert read_texts([tmp_path / "one.jsonl", tmp_path / "two.jsonl.gz"]) == 2 * wanted
    assert read_texts([tmp_path / "three.txt"]) == [Sample(text="d e f")]


@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b"{}", b'{"prompt": 1}', b'{"prompt": ""}', b'{"prompt": "a", "text": "b"}', b'{"text": "\xff"}', b"\x00"],
)
def test_what_is_not_a_sample_is_refused_by_its_line(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n' + content)
    with pytest.raises(UsageError, match="cannot read line 2 of"):
        read_texts([path])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "not.jsonl.gz").write_bytes(b"not gzip")
    (tmp_path / "not.txt").write_bytes(b"\xff")
    for name in ("missing.jsonl", "not.jsonl.gz", "not.txt", "."):
        with pytest.raises(UsageError, match="cannot read"):
            read_texts([tmp_path / name])


def test_the_assistants_turns_are_learned_and_nothing_else(text: Text) -> None:
    sample = Sample(messages=[Message(*turn) for turn in TURNS])
    for ids, drafted in given_examples([sample] * 40, text, 512)[:1]:
        learned: list[list[int]] = [[]]
        for token, own in zip(ids, drafted, strict=True):
            if own:
                learned[-1].append(token)
            elif learned[-1]:
                learned.append([])
        written = [text.tokenizer.decode(each, skip_special_tokens=True).strip() for each in learned if each]
        assert written == [content for role, content in TURNS if role == "assistant"]


def test_a_prompt_ends_before_the_last_answer(text: Text) -> None:
    messages = [Message(*turn) for turn in TURNS]
    ids = prompts_of([Sample(messages=messages)] * 40, text, chat=True, longest=512)[0]
    assert ids == text.encode_chat([{"role": role, "content": content} for role, content in TURNS[:3]])
    story = "Once upon a time there was a little girl who lived with her mother. " * 4
    whole, plain = text.encode(story, chat=False), prompts_of([Sample(text=story)] * 60, text, chat=True, longest=512)
    assert all(each == whole[: len(each)] for each in plain)
    assert 8 <= min(map(len, plain)) < max(map(len, plain)) <= len(whole) // 2


def test_too_few_samples_are_refused(text: Text) -> None:
    with pytest.raises(UsageError, match="39 usable samples"):
        prompts_of([Sample(prompt="What is it?")] * 39, text, chat=True, longest=512)
    with pytest.raises(UsageError, match="0 usable samples"):
        given_examples([Sample(messages=[Message("user", "a")])] * 100, text, 512)
    with pytest.raises(UsageError, match="0 usable samples"):
        prompts_of([Sample(text="short")] * 100, text, chat=True, longest=512)
