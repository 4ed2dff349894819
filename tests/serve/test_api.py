"""Answers of the HTTP API as the official client sees them, and requests that it refuses: a real server over a real bundle."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.tests.serve.server import (
    PROMPT,
    Reached,
    counters,
    post,
    text_of,
)


def ended(outrider: Outrider, prompt: str, **params: Any) -> tuple[str | None, int]:
    """Why plain decoding ends, and after how many tokens."""
    (*_, last) = outrider.generate(prompt, SamplingParams(**params), k=0)
    return last.finish_reason, last.stats.emitted


def test_a_completion_is_the_text_of_plain_decoding(client: openai.OpenAI, alone: Outrider) -> None:
    done = client.completions.create(model="target", prompt=PROMPT, temperature=0, max_tokens=60)
    assert done.choices[0].text == text_of(alone, PROMPT, max_new_tokens=60)
    assert done.usage is not None
    assert (done.choices[0].finish_reason, done.usage.completion_tokens) == ended(alone, PROMPT, max_new_tokens=60)
    assert done.usage.prompt_tokens == len(alone.text.encode(PROMPT, chat=False))


def test_a_stream_is_the_same_text_in_bursts(client: openai.OpenAI, alone: Outrider) -> None:
    asked: dict[str, Any] = {"model": "target", "prompt": PROMPT, "temperature": 0, "max_tokens": 60}
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == text_of(alone, PROMPT, max_new_tokens=60)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-2]] == [None] * (len(chunks) - 2)
    assert len(chunks) < 55  # a chunk has several tokens
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    result = chunks[-1].metrics["speculative_decoding"]
    assert result["num_spec_steps"] == sum(result["acceptance_histogram"]) > 0
    accepted = sum(at * count for at, count in enumerate(result["acceptance_histogram"]))
    assert result["num_accepted_draft_tokens"] == accepted
    assert result["mean_acceptance_length"] == pytest.approx(1 + accepted / result["num_spec_steps"])
    assert result["draft_acceptance_rate"] == pytest.approx(accepted / result["num_draft_tokens"])


def test_chat_goes_through_the_template(client: openai.OpenAI, alone: Outrider) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "A table "}, {"type": "text", "text": "for two."}]},
    ]
    done = client.chat.completions.create(model="target", messages=messages, temperature=0, max_completion_tokens=40)
    want = text_of(alone, "Agent: Be brief.\nCustomer: A table for two.\nAgent:", max_new_tokens=40)
    assert done.choices[0].message.content == want
    chunks = client.chat.completions.create(
        model="target", messages=messages, temperature=0, max_completion_tokens=40, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == want


def test_a_seed_fixes_the_answer_and_choices_differ(client: openai.OpenAI, alone: Outrider) -> None:
    asked: dict[str, Any] = {"model": "target", "prompt": PROMPT, "seed": 11, "max_tokens": 30, "n": 3, "temperature": 1.0}
    first, second = (client.completions.create(**asked) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices]
    assert len(set(texts)) == 3
    assert texts[0] == text_of(alone, PROMPT, seed=11, temperature=1.0, max_new_tokens=30)
    assert first.metrics is None  # several choices have no single acceptance rate
    streamed = dict.fromkeys(range(3), "")
    for chunk in client.completions.create(**asked, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert list(streamed.values()) == texts


def test_stop_bias_and_logprobs(client: openai.OpenAI, alone: Outrider) -> None:
    whole = text_of(alone, PROMPT, max_new_tokens=60)
    stop = whole[10:14]
    done = client.completions.create(model="target", prompt=PROMPT, temperature=0, max_tokens=60, stop=[stop])
    assert done.choices[0].text == whole[: whole.index(stop)]
    assert done.choices[0].finish_reason == "stop"
    token = alone.text.encode("coffee", chat=False)[0]
    biased = client.completions.create(
        model="target", prompt=PROMPT, temperature=0, max_tokens=3, logit_bias={str(token): 100}, logprobs=2
    )
    result = biased.choices[0].logprobs
    assert result is not None
    assert result.tokens == [alone.text.token(token)] * 3
    assert result.top_logprobs is not None
    assert [(len(each), max(each.values()) <= 0) for each in result.top_logprobs] == [(2, True)] * 3
    chat = client.chat.completions.create(
        model="target", messages=[{"role": "user", "content": "Hi"}], max_tokens=4, logprobs=True, top_logprobs=2
    )
    content = chat.choices[0].logprobs.content if chat.choices[0].logprobs else None
    assert content is not None
    assert [len(each.top_logprobs) for each in content] == [2] * 4
    assert [bytes(each.bytes or []).decode() for each in content] == [each.token for each in content]


def test_several_prompts_and_token_ids(client: openai.OpenAI, alone: Outrider) -> None:
    ids = alone.text.encode(PROMPT, chat=False)
    done = client.completions.create(model="target", prompt=[PROMPT, "Once"], temperature=0, max_tokens=10)
    assert [choice.index for choice in done.choices] == [0, 1]
    by_ids = client.completions.create(model="target", prompt=ids, temperature=0, max_tokens=10)
    many = client.completions.create(model="target", prompt=[ids], temperature=0, max_tokens=10)
    assert by_ids.choices[0].text == many.choices[0].text == done.choices[0].text
    assert done.choices[1].text == text_of(alone, "Once", max_new_tokens=10)


def test_tokens_and_text_are_those_of_the_tokenizer(server: Reached, alone: Outrider) -> None:
    tokenizer = alone.text.tokenizer
    for add in (True, False):
        body = {"prompt": PROMPT, "add_special_tokens": add, "return_token_strs": True}
        status, answer = post(server, "/tokenize", json.dumps(body).encode())
        ids = tokenizer.encode(PROMPT, add_special_tokens=add).ids
        assert (status, answer["tokens"], answer["count"]) == (200, ids, len(ids))
        assert answer["max_model_len"] == alone.build.capacity
        assert "".join(answer["token_strs"]) == tokenizer.decode(ids, skip_special_tokens=False)
    status, answer = post(server, "/detokenize", json.dumps({"tokens": ids}).encode())
    assert (status, answer) == (200, {"prompt": PROMPT})
    messages = [{"role": "user", "content": "Hi"}]
    for add, end in ((True, "Agent:"), (False, "Customer: Hi\n")):
        of_chat = {"messages": messages, "add_generation_prompt": add}
        _, answer = post(server, "/tokenize", json.dumps(of_chat).encode())
        assert tokenizer.decode(answer["tokens"]).endswith(end)
    refused: list[tuple[str, dict[str, Any], str | None]] = [
        ("/tokenize", {}, None),
        ("/tokenize", {"prompt": "x", "messages": messages}, None),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": False}, None),
        ("/tokenize", {"prompt": "x" * 100_000}, "prompt"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 10_000}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
    ]
    for path, wrong, param in refused:
        status, answer = post(server, path, json.dumps(wrong).encode())
        assert (status, answer["error"]["param"]) == (400, param), answer


def test_a_template_gets_its_own_variables(client: openai.OpenAI, alone: Outrider) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]

    def answer(**variables: Any) -> str | None:
        options = {"chat_template_kwargs": variables}
        done = client.chat.completions.create(
            model="target", messages=messages, temperature=0, max_tokens=8, extra_body=options
        )
        return done.choices[0].message.content

    assert answer(manner=" Yes") == text_of(alone, "Customer: Hi\nAgent: Yes", max_new_tokens=8)
    assert answer() == text_of(alone, "Customer: Hi\nAgent:", max_new_tokens=8)
    with pytest.raises(openai.BadRequestError, match="messages is a reserved template variable") as caught:
        answer(messages=[])
    assert caught.value.param == "chat_template_kwargs"


def test_a_request_may_have_a_shorter_timeout(client: openai.OpenAI) -> None:
    """These 16 answers take two seconds and more on two cores."""
    options = {"timeout": 1, "priority": -5, "min_tokens": 470, "top_k": 50}
    with pytest.raises(openai.InternalServerError, match="longer than 1 seconds"):
        client.completions.create(model="target", prompt=PROMPT, n=16, max_tokens=470, extra_body=options)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x", "timeout": 0.5}, "timeout"),
        ({"prompt": "x", "priority": 0.5}, "priority"),
        ({"prompt": "x", "tools": [{}]}, "tools"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "echo": True}, "echo"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "temperature": "hot"}, "temperature"),
        ({"prompt": "x", "top_p": 0}, "top_p"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 2.5}, "max_tokens"),
        ({"prompt": "x", "n": 0}, "n"),
        ({"prompt": "x", "n": 17}, "n"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "logit_bias": {"999999": 1}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
        ({"prompt": "x", "stop": [""]}, "stop"),
        ({"prompt": "x", "seed": 2**64}, "seed"),
        ({"prompt": "x", "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, None),
        ({"prompt": "x", "stop": ["a"] * 17}, "stop"),
        ({"prompt": "x", "stop_token_ids": [1] * 257}, "stop_token_ids"),
        ({"prompt": "x", "logit_bias": {str(at): 1 for at in range(1025)}}, "logit_bias"),
        ({"prompt": [999999]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": "x", "min_tokens": 600, "max_tokens": 600}, "min_tokens"),
        ({}, "prompt"),
    ],
    ids=lambda each: json.dumps(each)[:40],
)
def test_an_unsupported_or_invalid_field_is_refused_by_name(server: Reached, body: dict[str, Any], param: str | None) -> None:
    status, answer = post(server, "/v1/completions", json.dumps(body).encode())
    assert status == 400, answer
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"] == param, answer
    assert answer["error"]["message"]
    assert "--" not in answer["error"]["message"]  # advice for the command line
    assert "_new_tokens" not in answer["error"]["message"]  # the library's name of a parameter


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "refuse"}]}, "messages"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"min_tokens": 600, "max_completion_tokens": 600}, "min_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"temperature": -1}, "temperature"),
    ],
    ids=lambda each: json.dumps(each)[:40],
)
def test_a_chat_error_names_the_field(server: Reached, fields: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    status, answer = post(server, "/v1/chat/completions", json.dumps(body).encode())
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert "--" not in answer["error"]["message"]
    assert "_new_tokens" not in answer["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "max_tokens": 1' + b"0" * 5000 + b"}",
    ],
    ids=range(12),
)
def test_an_invalid_body_is_refused(server: Reached, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        status, answer = post(server, path, body)
        assert 400 <= status < 500
        assert answer["error"]["message"]


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="the model 'gpt' does not exist"):
        client.completions.create(model="gpt", prompt="x")
    assert [model.id for model in client.models.list()] == ["target"]


def test_messages_that_the_template_rejects(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="never say that"):
        client.chat.completions.create(model="target", messages=[{"role": "user", "content": "refuse"}])


def test_concurrent_clients_get_what_each_would_get_alone(client: openai.OpenAI, alone: Outrider, server: Reached) -> None:
    prompts = [f"Customer: I would like {number} tickets for the " for number in range(12)]
    want = [text_of(alone, prompt, max_new_tokens=40) for prompt in prompts]

    def ask(prompt: str) -> str:
        return client.completions.create(model="target", prompt=prompt, temperature=0, max_tokens=40).choices[0].text

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, prompts)) == want
    result = counters(server)
    assert result["outrider_num_requests_running"] == result["outrider_num_requests_waiting"] == 0
    assert result["outrider_kv_cache_usage"] == 0
    assert result['outrider_spec_decode_num_accepted_tokens_total{drafter="model"}'] > 0
    assert result["outrider_time_to_first_token_seconds_count"] >= 12
