"""Text that is never taken back: whole characters, and nothing that may become a stop string."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models

from outrider.bundle.manifest import CHAT_TEMPLATE, TOKENIZER, Generation
from outrider.errors import UsageError
from outrider.runtime.generation import Outrider
from outrider.runtime.text.chat_template import TOOLS, Chat, ChatTemplate, with_tools
from outrider.runtime.text.stream import TOKEN_MARK, TextStream
from outrider.runtime.text.text import Text
from outrider.tests.support import END, sentencepiece, tokenizer

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


def test_no_more_is_held_back_than_may_become_a_stop_string() -> None:
    made, stops = tokenizer(vocab_size=258), ("aabaac", "abab", "bbbb", "baabb")
    for seed in range(50):
        stream, text, shown = TextStream(made, [], stops), "", ""
        for letter in random.Random(seed).choices("ab", k=60):
            text += letter
            shown += "".join(piece for piece, _ in stream.push(made.encode(letter).ids[0], from_draft=False))
            if stream.stopped:
                assert shown == text[: min(text.index(stop) for stop in stops if stop in text)]
                break
            ends = [size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])]
            assert shown == text[: len(text) - max(ends, default=0)]


@pytest.mark.parametrize("prompt", ["say ", "ends in \ufffd", "🙂", "a\ufffd\ufffd"])
def test_nothing_of_the_prompt_is_said_again(prompt: str) -> None:
    made = tokenizer(vocab_size=258)
    text = "b 🙂 c"
    assert "".join(pushed(TextStream(made, made.encode(prompt).ids, ()), made.encode(text).ids)) == text


def test_a_character_that_the_prompt_began_comes_whole() -> None:
    made = tokenizer(vocab_size=258)
    ids = made.encode("x🙂y").ids
    assert "".join(pushed(TextStream(made, ids[:3], ()), ids[3:])) == "🙂y"


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
    assert text.render(Chat([{"role": "user", "content": "hi"}])) == "<s>[user] hi"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system') }}",
        "{{ nothing.at.all }}",
        "{% for %}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",  # the sandbox: a template cannot reach the machine
    ],
)
def test_a_chat_template_that_fails_is_one_error(tiny_bundle: Path, tiny: Outrider, tmp_path: Path, template: str) -> None:
    with pytest.raises(UsageError, match=r"chat template (rejects|is not valid)"):
        templated(tiny_bundle, tiny, template, tmp_path).render(Chat([{"role": "user", "content": "hi"}]))


TYPED = "{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}"
LISTS = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}" + TYPED + "{% endfor %}{% endfor %}"
SELECTED = (  # as Llava's, and with the system's message as text
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'system' %}{{ m.content + '' }}{% else %}"
    "{{ m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join }}{% endif %}{% endfor %}"
)
BOTH = "{% for m in messages %}<{{ m.role }}>{{ m.content if m.content is string else 'parts' }}{% endfor %}"
STRICT = "{{ raise_exception('a list, please') if messages[0].content is string }}" + LISTS


@pytest.mark.parametrize("template", [LISTS, SELECTED, BOTH, STRICT])
def test_a_template_reads_content_in_the_form_that_it_shows(template: str) -> None:
    said = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "A secret"},
        {"role": "assistant", "content": ""},
    ]
    assert ChatTemplate(template, {}).render(Chat(said)) == "<system>Be kind.<user>A secret<assistant>"


TEXTS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
BRANCH = "{% for m in messages %}<{{ m.role }}>{{ m.content[0].text if tools else m.content }}{% endfor %}"


@pytest.mark.parametrize("template", [with_tools(TEXTS, LISTS), with_tools(LISTS, TEXTS), BRANCH])
def test_a_template_may_read_content_in_another_form_where_there_are_tools(template: str) -> None:
    said = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "A secret"}]
    for tools in ((), TOOLS):
        assert ChatTemplate(template, {}).render(Chat(said, tools)) == "<system>Be kind.<user>A secret"


def test_a_template_that_does_not_show_what_users_say_where_there_are_tools_is_refused_there() -> None:
    template, said = ChatTemplate("{{ 'tools' if tools else messages[-1].content }}", {}), [{"role": "user", "content": "hi"}]
    assert template.render(Chat(said)) == "hi"
    with pytest.raises(UsageError, match="does not show what users say in chats with tools"):
        template.render(Chat(said, TOOLS))


@pytest.mark.parametrize(
    "template", ["{% for m in messages %}<{{ m.role }}>{% endfor %}", "", "{{ messages[0].content[0].words }}"]
)
def test_a_template_that_does_not_show_what_users_say_is_refused(template: str) -> None:
    with pytest.raises(UsageError, match="does not show what users say"):
        ChatTemplate(template, {}).render(Chat([{"role": "user", "content": "hi"}]))


@pytest.mark.parametrize(
    "default", ["{%- for m in messages %}\n  {{- m.content }}\n{% endfor %}\n  \n", " {{ messages[0].content -}} \n"]
)
def test_a_template_for_tools_and_one_without_are_each_as_if_alone(default: str) -> None:
    tools = "\n{% macro of(t) %}{{ t.name }}{% endmacro %}{{ of(tools[0]) }} {{ messages[-1].content }}\n   "
    said, known = [{"role": "user", "content": "hi"}], [{"name": "f"}]
    both = ChatTemplate(with_tools(default, tools), {})
    assert both.render(Chat(said)) == ChatTemplate(default, {}).render(Chat(said))
    assert both.render(Chat(said, known)) == ChatTemplate(tools, {}).render(Chat(said, known)) != both.render(Chat(said))


def test_the_chat_template_is_compiled_once(
    tiny_bundle: Path, tiny: Outrider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    compile_template = jinja2.Environment.compile

    def counting(*arguments: Any, **options: Any) -> Any:
        compiled.append(arguments)
        return compile_template(*arguments, **options)

    monkeypatch.setattr(jinja2.Environment, "compile", counting)
    text = templated(tiny_bundle, tiny, "{% for m in messages %}[{{ m.content }}]{% endfor %}", tmp_path)
    assert [text.render(Chat([{"role": "user", "content": content}])) for content in "abc"] == ["[a]", "[b]", "[c]"]
    assert len(compiled) == 1


def test_what_transformers_gives_a_template_is_there(tiny_bundle: Path, tiny: Outrider, tmp_path: Path) -> None:
    template = (
        "{% generation %}{{ messages[0] | tojson }}{% endgeneration %}{% if tools is not none %}tools{% endif %}"
        "{% for m in messages %}{% break %}{% endfor %}{{ strftime_now('%Y')[:2] }}"
    )
    text = templated(tiny_bundle, tiny, template, tmp_path)
    assert text.render(Chat([{"role": "user", "content": "<é>"}])) == '{"role": "user", "content": "<é>"}20'


def test_a_tokenizer_that_would_cut_the_prompt_does_not(tiny_bundle: Path, tiny: Outrider, tmp_path: Path) -> None:
    whole = tiny.text.encode("the quick brown fox jumps", chat=False)
    cutting = tokenizer()
    cutting.enable_truncation(3)
    cutting.enable_padding(length=50)
    text = templated(tiny_bundle, tiny, "", tmp_path, cutting.to_str())
    assert text.encode("the quick brown fox jumps", chat=False) == whole


def templated(bundle: Path, loaded: Outrider, template: str, folder: Path, made: str | None = None) -> Text:
    """The text side of a bundle with this chat template, and with the tokenizer `made` where one is given."""
    (folder / CHAT_TEMPLATE).write_text(template)
    (folder / TOKENIZER).write_text(made or (bundle / TOKENIZER).read_text())
    generation = Generation(eos_token_ids=[0], special_tokens={"bos_token": "<s>", "messages": "no"})
    files = {**loaded.manifest.files, CHAT_TEMPLATE: loaded.manifest.files[TOKENIZER]}
    return Text.load(folder, msgspec.structs.replace(loaded.manifest, generation=generation, files=files))


def test_bytes_that_were_no_character_do_not_stop_a_text() -> None:
    """Nor change what is around them, as they do where a tokenizer with a token for each byte decodes a whole text."""
    made: Any = sentencepiece()
    newline, lead, letter, word = map(made.token_to_id, ("<0x0A>", "<0xE2>", "b", "\u2581c"))
    for prompt in ([word], [newline, lead, letter]):
        texts = pushed(TextStream(made, prompt, ()), [newline, lead, letter, word, lead, lead, newline, letter, letter])
        assert texts == ["\n", "", "\ufffdb", " c", "", "\ufffd", "\ufffd\n", "b", "b", ""]


@pytest.mark.parametrize("made", [tokenizer(), sentencepiece()], ids=["byte-level", "sentencepiece"])
def test_text_is_that_of_the_bytes_of_its_tokens(made: Tokenizer) -> None:
    text, each = "a b caf\u00e9 \u4e2d\u6587 \U0001f642\u200d\U0001f469 abc", Text(made, None)
    ids = made.encode(text).ids
    said = b"".join(map(each.token_bytes, ids)).decode()
    assert said.removeprefix(" ") == text == made.decode(ids)
    assert "".join(pushed(TextStream(made, [], ()), ids)) == text
    assert "".join(pushed(TextStream(made, ids, ()), ids)) == said
    special = min(made.get_added_tokens_decoder())
    assert each.token_bytes(made.get_vocab_size()) == b""
    assert each.token(special) == made.id_to_token(special)


def test_half_characters_hold_back_nothing_but_themselves() -> None:
    vocabulary = {"k": 0, "a\u00f0": 1, "\u00f0": 2}  # the last is the first of four bytes
    made = Tokenizer(models.BPE(vocabulary, []))
    made.decoder = decoders.ByteLevel()
    assert pushed(TextStream(made, [], ()), [0, 1, 2, 2, 0]) == ["k", "a", "\ufffd", "\ufffd", "\ufffdk", ""]
    for stop, text in (("ka", ""), ("a\ufffd", "k"), ("\ufffdk", "ka\ufffd\ufffd")):
        stream = TextStream(made, [], (stop,))
        assert ("".join(pushed(stream, [0, 1, 2, 2, 0])), stream.stopped) == (text, True)
    stream = TextStream(made, [], ("a\ufffd",))  # complete at the end only
    assert (pushed(stream, [0, 1]), stream.stopped) == (["k", "", ""], True)
    assert pushed(TextStream(made, [0, 2], ()), [0, 2]) == ["k", "", "\ufffd"]  # without the prompt's half character


def test_stop_strings_match_the_text_without_marks_and_special_tokens() -> None:
    made: Any = tokenizer(300)
    made.add_special_tokens(["<|call|>"])
    made.add_tokens(["</think>"])
    call, thought = map(made.token_to_id, ("<|call|>", "</think>"))
    the, quick = (made.encode(text).ids for text in (" the", "quick"))
    shown = {call: "<|call|>", thought: "</think>"}
    for stop, ids, text in (
        (">q", [*the, thought, *quick], f" the{TOKEN_MARK}</think"),
        ("</think>", [*the, thought, *quick], " the"),
        ("eq", [*the, call, *quick], " th"),
        ("call", [*the, call, *quick], f" the{TOKEN_MARK}<|call|>quick"),
    ):
        stream = TextStream(made, [1], (stop,), shown)
        pieces = [piece for token in ids for piece in stream.push(token, from_draft=False)] + stream.finish()
        assert ("".join(piece for piece, _ in pieces), stream.stopped) == (text, stop != "call"), stop


def test_special_tokens_that_are_shown_are_text_beside_others_that_are_not() -> None:
    """Also between the bytes of a character, and at the end of the prompt."""
    made = tokenizer()
    made.add_special_tokens(["<|call|>", "<|other|>"])
    call, other = made.encode("<|call|><|other|>").ids
    first, *rest = made.encode("🙂").ids
    stream = TextStream(made, [call], ("fox",), {call: "<|call|>"})
    ids = [other, *made.encode(" the").ids, call, first, call, *made.encode("quick").ids, other, *made.encode(" fox").ids]
    assert "".join(pushed(stream, ids)) == f" the{TOKEN_MARK}<|call|>\ufffd{TOKEN_MARK}<|call|>quick "
    assert stream.stopped
    assert rest
