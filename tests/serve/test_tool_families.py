"""Tool calls in the form of each family, by random models, and where a template has no form for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from outrider.export.pair import export_pair
from outrider.tests.serve.calls import HI, SCHEMAS, ask, check, streamed, tool
from outrider.tests.serve.families import EXAMPLES, tokenizer_of
from outrider.tests.serve.server import Reached, ServerHere, chat_bundle, fetch, serving_here
from outrider.tests.support import build, llama, write_checkpoint


def random_server(folder: Path, family: str) -> ServerHere:
    """A server of a random model with the tokens and the template of a family."""
    made = tokenizer_of(family)
    rows = max(tokenizer_of(each).get_vocab_size() for each in FAMILIES)  # in all of them, so that they share a trace
    model = llama(vocab_size=rows, max_position_embeddings=1024, num_hidden_layers=1)
    (write_checkpoint(folder / "model", model, made) / "chat_template.jinja").write_text(EXAMPLES[family].template)
    export_pair(str(folder / "model"), None, folder / "onnx", precision="fp32")
    return ServerHere(build(folder / "onnx", folder / "bundle", k=[1, 2], batch=4, capacity=1023))


FAMILIES = ("hermes", "qwen_xml", "mistral", "mistral 2025", "gpt_oss")


@pytest.fixture(scope="module", params=FAMILIES)
def of_family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Reached]]:
    server = random_server(tmp_path_factory.mktemp("family"), request.param)
    server.ready()
    yield request.param, server
    server.stop()


@pytest.mark.parametrize("stream", [False, True])
def test_each_family(of_family: tuple[str, Reached], stream: bool) -> None:
    """Random models: of all that their families' grammars allow, only calls are left."""
    name, server = of_family
    # GPT-OSS may say as much as it likes before it calls; without this token it can only begin a call.
    bias = {str(tokenizer_of(name).token_to_id("<|channel|>")): -100} if name == "gpt_oss" else {}
    parallel = {
        "parallel_tool_calls": False,
        "tool_choice": "required",
        "logit_bias": bias,
        "model": "model",
        "max_tokens": 300,
    }
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        done = ask(client, **parallel, stream=stream)
        if stream:
            calls, _, reason = streamed(done)
            assert reason == "tool_calls"
            (call,) = calls
            jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])
        else:
            (choice,) = done.choices
            assert choice.finish_reason == "tool_calls", choice
            (call,) = choice.message.tool_calls
            check(call)
            assert name[:7] != "mistral" or len(call.id) == 9


def test_the_part_of_a_grammar_that_cannot_be_compiled_is_named(of_family: tuple[str, Reached]) -> None:
    _, server = of_family
    schemas = {"good": {"type": "object"}, "bad": {"type": "object", "properties": {"a": {"type": "b"}}}}
    for parameters, schema, fields in (
        ("good", "bad", {"structured_outputs"}),
        ("bad", "good", {"tools"}),
        ("bad", "bad", {"structured_outputs", "tools"}),
    ):
        wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schemas[schema]}}
        body = {"messages": HI, "tools": tool(parameters=schemas[parameters]), "response_format": wanted}
        status, _, answer = fetch(f"{server.url}/v1/chat/completions", json.dumps(body).encode())
        assert (status, json.loads(answer)["error"]["param"] in fields) == (400, True), answer


@pytest.mark.parametrize("of_family", [name for name in FAMILIES if EXAMPLES[name].others], indirect=True)
def test_a_model_decides_by_a_token_of_its_own_and_may_think_before(of_family: tuple[str, Reached]) -> None:
    """A bias stands for the decision: for the token that opens a call, and for the one that ends an opened thought."""
    name, server = of_family
    vocabulary = tokenizer_of(name)
    options: Any = {"model": "model", "parallel_tool_calls": False, "max_tokens": 300}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        done = ask(client, **options, logit_bias={str(vocabulary.token_to_id("<tool_call>")): 100}).choices[0]
        assert done.finish_reason == "tool_calls"
        check(done.message.tool_calls[0])
        opened = {"chat_template_kwargs": {"opening": "<think>\n"}}
        closing = {str(vocabulary.token_to_id("</think>")): 100}
        done = ask(client, **options, logit_bias=closing, tool_choice="required", extra_body=opened).choices[0]
        assert (done.finish_reason, done.message.reasoning_content) == ("tool_calls", "")
        check(done.message.tool_calls[0])


@pytest.mark.parametrize("of_family", ["gpt_oss"], indirect=True)
def test_channels_are_read_without_tools(of_family: tuple[str, Reached]) -> None:
    _, server = of_family
    grammar = 'start: <|channel|> "analysis" <|message|> "Well." <|end|> <|start|> "assistant" <|channel|> "final" <|message|>'
    structured = {"structured_outputs": {"grammar": f'{grammar} "Hi."'}}
    _, _, answer = fetch(f"{server.url}/v1/chat/completions", json.dumps({"messages": HI} | structured).encode())
    (choice,) = json.loads(answer)["choices"]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Well.", "Hi.")
    assert choice["finish_reason"] == "stop"
    _, _, answer = fetch(f"{server.url}/v1/responses", json.dumps({"input": "Hi"} | structured).encode())
    thought, said = json.loads(answer)["output"]
    assert (thought["content"][0]["text"], said["content"][0]["text"]) == ("Well.", "Hi.")


def test_a_template_without_tools_refuses_them(trained_export: Path, tmp_path: Path) -> None:
    with serving_here(chat_bundle(trained_export, tmp_path / "bundle")) as server:
        body = {"messages": HI, "tools": tool()}
        status, _, answer = fetch(f"{server.url}/v1/chat/completions", json.dumps(body).encode())
        assert (status, json.loads(answer)["error"]["param"]) == (400, "tools")
