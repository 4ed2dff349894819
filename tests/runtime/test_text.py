"""Text that is never taken back: whole characters, and nothing that may become a stop string."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.engines.errors import UsageError
from outrider.engines.manifest import CHAT_TEMPLATE, Generation
from outrider.runtime.generation import Outrider
from outrider.runtime.text import Text, TextStream
from outrider.tests.support import END, reseal, tokenizer

MIXED = "naïve café — 中文 🙂👩‍👩‍👧 done"


def pushed(stream: TextStream, ids: list[int]) -> list[str]:
    """The text after each token, until a stop string; then what was held back."""
    out = []
    for token in ids:
        out.append("".join(text for text, _ in stream.push(token, from_draft=False)))
        if stream.stopped:
            break
    return [*out, "".join(text for text, _ in stream.finish())]


def test_multi_byte_characters_come_whole() -> None:
    made = tokenizer()
    ids = made.encode(MIXED).ids
    assert len(ids) > len(MIXED.split())  # some characters take several tokens
    texts = pushed(TextStream(made, [], ()), ids)
    assert "".join(texts) == MIXED
    assert not any("�" in text for text in texts)


def test_a_character_cut_in_half_is_shown_at_the_end_only() -> None:
    made = tokenizer(vocab_size=258)  # bytes only
    ids = made.encode("a🙂").ids[:-1]
    texts = pushed(TextStream(made, [], ()), ids)
    assert texts[:-1] == ["a", "", "", ""]
    assert "�" in texts[-1]


@pytest.mark.parametrize("stop", ["fox", "x j", " jumps over"])
def test_a_stop_string_ends_the_text_before_it(stop: str) -> None:
    made = tokenizer(vocab_size=258)  # one token a byte, so every stop string spans tokens
    text = "the quick brown fox jumps over"
    stream = TextStream(made, [], (stop,))
    assert "".join(pushed(stream, made.encode(text).ids)) == text[: text.index(stop)]
    assert stream.stopped


def test_the_first_of_several_stop_strings_wins() -> None:
    made = tokenizer()
    assert (
        "".join(pushed(TextStream(made, [], ("lazy", "brown", "dog")), made.encode("the quick brown lazy dog").ids))
        == "the quick "
    )


def test_what_only_looked_like_a_stop_string_comes_out() -> None:
    made = tokenizer(vocab_size=258)
    texts = pushed(TextStream(made, [], ("quiz",)), made.encode("the quick qui").ids)
    assert "".join(texts) == "the quick qui"
    assert texts[-1] == "qui"  # held back until the end


def test_special_tokens_are_no_text() -> None:
    made = tokenizer()
    ids = [*made.encode("the").ids, 0]
    assert made.id_to_token(0) == END
    assert "".join(pushed(TextStream(made, [], ()), ids)) == "the"


def test_pieces_keep_their_origin_when_held_back() -> None:
    made = tokenizer(vocab_size=258)
    stream = TextStream(made, [], ("abz",))
    ids = made.encode("abc").ids
    assert stream.push(ids[0], from_draft=True) == []
    assert stream.push(ids[1], from_draft=False) == []
    assert stream.push(ids[2], from_draft=True) == [("a", True), ("b", False), ("c", True)]


def test_the_chat_template_is_applied(tiny_bundle: Path, tiny: Outrider, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no chat template"):
        tiny.generate("hello", chat=True)
    text = templated(
        tiny_bundle, tiny, "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}", tmp_path
    )
    assert text.render([{"role": "user", "content": "hi"}]) == "<s>[user] hi"


@pytest.mark.parametrize("template", ["{{ raise_exception('no system') }}", "{{ nothing.at.all }}", "{% for %}"])
def test_a_chat_template_that_fails_is_one_error(tiny_bundle: Path, tiny: Outrider, tmp_path: Path, template: str) -> None:
    with pytest.raises(UsageError, match="chat template refuses"):
        templated(tiny_bundle, tiny, template, tmp_path).render([{"role": "user", "content": "hi"}])


def test_a_chat_template_cannot_reach_the_machine(tiny_bundle: Path, tiny: Outrider, tmp_path: Path) -> None:
    template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(UsageError, match="chat template refuses"):
        templated(tiny_bundle, tiny, template, tmp_path).render([{"role": "user", "content": "hi"}])


def templated(bundle: Path, loaded: Outrider, template: str, folder: Path) -> Text:
    """The text side of a bundle with this chat template."""
    copy = folder / "bundle"
    copy.mkdir()
    for name in ("tokenizer.json", "manifest.json"):
        (copy / name).write_bytes((bundle / name).read_bytes())
    (copy / CHAT_TEMPLATE).write_text(template)
    reseal(copy, generation=Generation(eos_token_ids=[0], special_tokens={"bos_token": "<s>"}))
    from outrider.engines.folder import read_manifest

    return Text(copy, read_manifest(copy))
