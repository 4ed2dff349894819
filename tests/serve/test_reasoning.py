"""What a model thinks is separated from what it says, however the text comes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.export.pair import export_pair
from outrider.runtime.generation import Outrider
from outrider.runtime.grammar.compiler import LocalGrammars
from outrider.runtime.grammar.structured import StructuredOutputs
from outrider.runtime.params import SamplingParams
from outrider.runtime.request import Event
from outrider.runtime.stats import Stats
from outrider.runtime.text.stream import TextStream
from outrider.runtime.text.text import Text
from outrider.serve.api.answer import AnswerFormat
from outrider.serve.api.reasoning import MARKS, ReasoningSplitter, Split
from outrider.serve.tools.base import Part
from outrider.tests.serve.server import Reached, serving_here
from outrider.tests.support import build, llama, tokenizer, write_checkpoint

PARTS = st.text(alphabet="<think>/ \nab", max_size=20)


def split(prompt: str, pieces: list[str]) -> Split:
    splitter = ReasoningSplitter(MARKS[0], prompt)
    parts = [splitter.push(piece, last=index == len(pieces) - 1) for index, piece in enumerate(pieces)]
    return Split("".join(part.reasoning_content for part in parts), "".join(part.content for part in parts))


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "content"),
    [
        ("user: hi", "<think>\nWell.\n</think>\n\nHello.", "Well.\n", "Hello."),
        ("user: hi <think>\n", "Well.</think>Hello.", "Well.", "Hello."),
        ("user: <think> hi", "Hello <think> there", "", "Hello <think> there"),
        ("user: hi<think>\n\n</think>\n\n", " Hello.", "", " Hello."),
        ("", "<think>Well", "Well", ""),
        ("", "<thin", "", "<thin"),
        ("", "<think>Well</thin", "Well</thin", ""),
        ("", "<think></think></think>", "", "</think>"),
        ("", "", "", ""),
    ],
)
def test_the_parts_of_an_answer(prompt: str, text: str, reasoning: str, content: str) -> None:
    assert split(prompt, [text]) == Split(reasoning, content)
    assert split(prompt, [*text, ""]) == Split(reasoning, content)


@given(opened=st.booleans(), text=PARTS, cuts=st.lists(st.integers(0, 30), max_size=6))
def test_the_parts_do_not_depend_on_the_pieces(opened: bool, text: str, cuts: list[int]) -> None:
    text, prompt = ("" if opened else "<think>") + text + "</think>" + text, "<think>" if opened else ""
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[begin:end] for begin, end in itertools.pairwise(places)]
    assert split(prompt, pieces) == split(prompt, [text])


TEMPLATE = "{{ messages[-1].content }}{{ reasoning_effort }}{% if thinking %}<think>\n{% endif %}"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a random model whose tokenizer has the marks."""
    folder, made = tmp_path_factory.mktemp("thinking"), tokenizer(300)
    made.add_tokens([*MARKS[0]])
    (write_checkpoint(folder / "model", llama(num_hidden_layers=1), made) / "chat_template.jinja").write_text(TEMPLATE)
    export_pair(str(folder / "model"), None, folder / "onnx", precision="fp32")
    return build(folder / "onnx", folder / "bundle", k=[1], batch=2)


@pytest.fixture(scope="module")
def server(bundle: Path, compilations: Callable[[], int]) -> Iterator[Reached]:
    with serving_here(bundle) as server:
        yield server


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("thinking", [False, True])
def test_chat_answers_have_both_parts(server: Reached, bundle: Path, thinking: bool, closed: bool) -> None:
    """Whole and streamed, with an answer that never closes the reasoning, and one that does nothing else."""
    closing = tokenizer(300).get_vocab_size() + 1
    bias = {closing: 100.0 if closed else -100.0, closing - 1: -100.0}
    prompt = "the quick" + ("<think>\n" if thinking else "")
    alone = Outrider.load(bundle)
    params = SamplingParams(max_new_tokens=12, logit_bias=bias)
    text = "".join(event.text for event in alone.generate(prompt, params, k=0))
    assert text.startswith("</think>") == closed
    want = ("", text.removeprefix("</think>")) if thinking and closed else (text.lstrip(), "") if thinking else ("", text)
    options: Any = {
        "model": "model",
        "messages": [{"role": "user", "content": "the quick"}],
        "temperature": 0,
        "max_tokens": 12,
        "logit_bias": {str(token): value for token, value in bias.items()},
        "extra_body": {"chat_template_kwargs": {"thinking": thinking}},
    }
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        message: Any = client.chat.completions.create(**options).choices[0].message
        deltas: list[Any] = [chunk.choices[0].delta for chunk in client.chat.completions.create(**options, stream=True)]
    assert (message.reasoning_content, message.content) == want
    streamed = ["".join(getattr(delta, name, None) or "" for delta in deltas) for name in ("reasoning_content", "content")]
    assert tuple(streamed) == want


@pytest.mark.parametrize("thinking", [False, True])
def test_a_grammar_holds_for_what_follows_the_reasoning(
    server: Reached, thinking: bool, compilations: Callable[[], int]
) -> None:
    """And is compiled once, with the reasoning before it."""
    closing, before = tokenizer(300).get_vocab_size() + 1, compilations()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        message: Any = (
            client.chat.completions.create(
                model="model",
                messages=[{"role": "user", "content": "the quick"}],
                temperature=1.0,
                seed=1,
                max_tokens=40,
                logit_bias={str(closing): 3, str(closing - 1): -100},
                extra_body={"chat_template_kwargs": {"thinking": thinking}, "structured_outputs": {"regex": "[x-z]{2,4}"}},
            )
            .choices[0]
            .message
        )
    assert re.fullmatch("[x-z]{2,4}", message.content)
    assert bool(message.reasoning_content) == thinking
    assert compilations() == before + 1


def test_the_effort_is_a_variable_of_the_template(server: Reached) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        prompts = []
        for effort in ("none", "high"):
            done = client.responses.create(
                model="model", input="the quick", reasoning={"effort": effort, "summary": "auto"}, max_output_tokens=1
            )
            assert done.reasoning is not None
            assert done.reasoning.effort == effort
            message: Any = {"role": "user", "content": "the quick"}
            chat = client.chat.completions.create(model="model", messages=[message], reasoning_effort=effort, max_tokens=1)
            assert chat.usage is not None
            assert done.usage is not None
            assert chat.usage.prompt_tokens == done.usage.input_tokens
            prompts.append(done.usage.input_tokens)
    made = tokenizer(300)
    assert prompts == [len(made.encode(f"the quick{effort}").ids) for effort in ("none", "high")]


def test_a_mark_spelled_by_other_tokens_ends_no_reasoning_before_structured_output() -> None:
    """The grammar covers the reasoning up to the token, so only the token may separate the two."""
    made: Any = tokenizer(300)
    made.add_tokens([*MARKS[0]])
    spelled = [token for each in "a</think>b" for token in made.encode(each, add_special_tokens=False).ids]
    ids = [made.token_to_id("<think>"), *spelled, made.token_to_id("</think>"), *made.encode("{}").ids]
    answers = AnswerFormat(Text(made, None), [0], [], "auto", True, StructuredOutputs(json_object=True))
    structured = answers.constraint([1])
    assert structured is not None
    assert LocalGrammars(made, made.get_vocab_size(), [0]).begin(structured).valid(ids) == len(ids)
    pieces = TextStream(made, [1], (), answers.shown).extend(ids, 0)
    parts = answers.reader([1]).read(Event((), (), tuple(pieces), Stats(prompt_tokens=1), "stop"))
    assert parts == [Part("reasoning_content", "a</think>b"), Part("content", "{}")]
