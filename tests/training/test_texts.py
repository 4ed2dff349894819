"""What a draft is trained on: which files are read, and which of their tokens are learned."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from outrider.bundle.folder import read_manifest
from outrider.errors import UsageError
from outrider.runtime.text.chat_template import Chat, ChatTemplate
from outrider.runtime.text.text import Text
from outrider.training.answers import given_examples, held_out, prompts_of
from outrider.training.texts import ChatMessage, Sample, read_texts

TURNS = [("user", "What is it?"), ("assistant", "A hotel in San Jose."), ("user", "Thanks."), ("assistant", "You are welcome.")]


@pytest.fixture(scope="module")
def text(trained_bundle: Path) -> Text:
    return Text.load(trained_bundle, read_manifest(trained_bundle))


def test_files_of_every_kind(tmp_path: Path) -> None:
    lines = [{"prompt": "a", "workload": "w"}, {"text": "b"}, {"messages": [{"role": "user", "content": "c"}]}]
    content = "\n".join(json.dumps(line) for line in lines) + "\n\n"
    (tmp_path / "one.jsonl").write_text(content)
    (tmp_path / "two.jsonl.gz").write_bytes(gzip.compress(content.encode()))
    (tmp_path / "three.txt").write_text("d e f")
    wanted = [Sample(prompt="a"), Sample(text="b"), Sample(messages=[ChatMessage("user", "c")])]
    assert read_texts([tmp_path / "one.jsonl", tmp_path / "two.jsonl.gz"]) == 2 * wanted
    assert read_texts([tmp_path / "three.txt"]) == [Sample(text="d e f")]


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b"{}",
        b'{"prompt": 1}',
        b'{"prompt": ""}',
        b'{"prompt": "a", "text": "b"}',
        b'{"text": "\xff"}',
        b"\x00",
        b'{"a": ' + b"[" * 200_000,
    ],
    ids=lambda content: content[:20],
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


def conversations(count: int) -> list[Sample]:
    return [
        Sample(messages=[ChatMessage("user", f"What are {number} rooms?"), *(ChatMessage(*turn) for turn in TURNS[1:])])
        for number in range(count)
    ]


def test_every_turn_of_the_assistant_is_learned_after_what_a_server_would_read(text: Text) -> None:
    eos = text.tokenizer.token_to_id("<|endoftext|>")
    given = given_examples(conversations(40), text, 512, [eos])
    assert len(given) == 80
    answers = [content for role, content in TURNS if role == "assistant"]
    for turn, ((ids, drafted), prompt) in enumerate(given[:2]):
        first = drafted.index(True)
        assert all(drafted[first:])
        assert ids[:first] == prompt
        assert text.tokenizer.decode(ids[first:], skip_special_tokens=True).strip() == answers[turn]
    first_turns = [{"role": "user", "content": "What are 0 rooms?"}]
    assert given[0].prompt == text.encode_chat(Chat(first_turns))


def test_control_tokens_in_a_prompt_stay_text(text: Text) -> None:
    samples = [Sample(messages=[ChatMessage("user", f"<|endoftext|> {at}"), ChatMessage(*TURNS[1])]) for at in range(40)]
    eos = text.tokenizer.token_to_id("<|endoftext|>")
    examples = given_examples(samples, text, 512, [eos])
    assert len(examples) == 40
    assert eos is not None
    assert all(eos not in each.prompt for each in examples)


def test_a_prompt_ends_before_the_last_answer(text: Text) -> None:
    asked = conversations(40)
    ids = prompts_of(asked, text, longest=512)[0]
    assert asked[0].messages is not None
    assert ids == text.encode_chat(Chat([{"role": each.role, "content": each.content} for each in asked[0].messages[:3]]))


def test_a_long_text_is_many_prompts(text: Text) -> None:
    story = " ".join(f"{at} apples and {at + 1} pears." for at in range(400))
    plain = prompts_of([Sample(text=story)], text, longest=64)
    whole = text.encode(story, chat=False)
    assert len(plain) == -(-len(whole) // 64) - (len(whole) % 64 < 16)
    assert plain[1] == whole[64 : 64 + len(plain[1])]
    assert 8 <= min(map(len, plain)) < max(map(len, plain)) <= 32
    given = given_examples([Sample(text=story)], text, 64, [])
    assert [each.prompt for each in given[: len(plain)]] == plain  # what is held out is asked like other texts
    assert given[0].example.ids == whole[:64]


def test_a_prompt_counts_once(text: Text) -> None:
    asked = conversations(40)
    assert prompts_of(asked * 3, text, longest=512) == prompts_of(asked, text, longest=512)
    with pytest.raises(UsageError, match="1 different usable prompts"):
        prompts_of(asked[:1] * 100, text, longest=512)


def test_at_most_64_prompts_are_held_out() -> None:
    for count in (40, 1000, 1343, 50_000):
        assert 2 <= sum(held_out(count)) <= 64


def test_what_cannot_be_used_is_refused_with_the_reason(text: Text, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="39 different usable prompts"):
        prompts_of(conversations(39), text, longest=512)
    with pytest.raises(UsageError, match="0 different usable prompts"):
        given_examples([Sample(messages=[ChatMessage("user", "a")])] * 100, text, 512, [])
    with pytest.raises(UsageError, match="0 different usable prompts"):
        prompts_of([Sample(text="short")] * 100, text, longest=512)
    strict = Text(text.tokenizer, ChatTemplate("{{ raise_exception('no system') }}", {}))
    with pytest.raises(UsageError, match="sample 1: the chat template rejects the messages: no system"):
        prompts_of(conversations(40), strict, longest=512)
    with pytest.raises(UsageError, match="the target has no chat template"):
        prompts_of(conversations(40), Text(text.tokenizer, None), longest=512)
