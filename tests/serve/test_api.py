"""The HTTP API as the official client sees it: a real server over a real bundle."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from outrider.bundle.folder import read_manifest
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.serve.network.signals import ENDING
from outrider.tests.serve.server import TEMPLATE, Reached, Server, chat_bundle, fetch, serving, serving_here
from outrider.tests.support import ROOT, run_here

PROMPT = "Customer: Hi, I would like to order a coffee.\nAgent:"


@pytest.fixture(scope="module")
def bundle(trained_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_bundle(trained_export, tmp_path_factory.mktemp("served") / "bundle")


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Reached]:
    with serving_here(bundle, k=4) as server:  # `k = auto` may not draft on a slow machine
        yield server


@pytest.fixture(scope="module")
def alone(bundle: Path) -> Outrider:
    return Outrider.load(bundle)


def text_of(outrider: Outrider, prompt: str, **params: Any) -> str:
    return "".join(event.text for event in outrider.generate(prompt, SamplingParams(**params), k=0))


def ended(outrider: Outrider, prompt: str, **params: Any) -> tuple[str | None, int]:
    """Why plain decoding ends, and after how many tokens."""
    (*_, last) = outrider.generate(prompt, SamplingParams(**params), k=0)
    return last.finish_reason, last.stats.emitted


def post(server: Reached, path: str, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    status, _, answer = fetch(server.url + path, body, **headers)
    return status, json.loads(answer)


def counters(server: Reached) -> dict[str, float]:
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


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


def test_the_dashboard_and_the_documents_name_existing_metrics(server: Reached) -> None:
    existing = {re.sub(r"{.*", "", name) for name in counters(server)}
    shown = set(re.findall(r"outrider_\w+", (ROOT / "deploy" / "grafana.json").read_text()))
    assert shown
    assert shown <= existing
    pages = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md") if path.name != "manifest.md")
    documented = set(re.findall(r"`(outrider_\w+)", pages))
    assert documented
    assert documented <= existing | {name.removesuffix("_bucket") for name in existing}


def test_a_disconnect_cancels_the_answer(server: Reached) -> None:
    """In the middle of a stream, and while a client waits for a whole answer."""
    for stream in ("true", "false"):
        before = counters(server).get('outrider_requests_total{finish_reason="cancelled"}', 0)
        host, port = server.url.removeprefix("http://").split(":")
        body = f'{{"prompt": "Once", "max_tokens": 500, "min_tokens": 500, "stream": {stream}}}'.encode()
        with socket.create_connection((host, int(port))) as connection:
            lines = [
                "POST /v1/completions HTTP/1.1",
                "Host: localhost",
                "Content-Type: application/json",
                f"Content-Length: {len(body)}",
            ]
            connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
            if stream == "true":
                assert connection.recv(1000)
            else:
                time.sleep(0.1)
        for _ in range(100):
            if counters(server).get('outrider_requests_total{finish_reason="cancelled"}', 0) == before + 1:
                break
            time.sleep(0.05)
        else:
            raise AssertionError("the answer was not cancelled")
        assert counters(server)["outrider_num_requests_running"] == 0


@pytest.mark.parametrize("stream", ["false", "true"])
def test_a_client_that_closes_its_side_is_told_so(server: Reached, stream: str) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    body = f'{{"prompt": "Once", "max_tokens": 400, "min_tokens": 400, "stream": {stream}}}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(f"{head}\r\n\r\n{body}".encode())
        answer = connection.recv(100) if stream == "true" else b""
        connection.shutdown(socket.SHUT_WR)
        answer += b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200 " if stream == "true" else b"HTTP/1.1 400 ")
    last = answer.removesuffix(b"0\r\n\r\n").strip().splitlines()[-1]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "half_closed"
    assert (b"data: " in last, answer.endswith(b"\r\n0\r\n\r\n")) == (stream == "true",) * 2


def test_keys(bundle: Path, tmp_path: Path) -> None:
    """A file of keys may have comments and a byte order mark."""
    (tmp_path / "keys").write_text("first\n\n# comment\n  # another\n second#part \n", encoding="utf-8-sig")
    with serving(bundle, "--api-key-file", str(tmp_path / "keys"), env={"OUTRIDER_API_KEYS": "third"}) as server:
        body = b'{"prompt": "x", "max_tokens": 1}'
        for key in ("first", "second#part", "third"):
            assert post(server, "/v1/completions", body, Authorization=f"Bearer {key}")[0] == 200
        assert post(server, "/v1/completions", body, Host="some.example", Authorization="Bearer third")[0] == 200
        for header in (None, "Bearer fourth", "first", "Bearer ", "Bearer # comment", "Bearer #", "Bearer # another"):
            wrong = {} if header is None else {"Authorization": header}
            status, answer = post(server, "/v1/completions", body, **wrong)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{server.url}/metrics")
        with urllib.request.urlopen(f"{server.url}/health") as answer:
            assert answer.status == 200
    assert not any(key in line for line in server.log for key in ('first"', "second#", "third", "fourth"))
    (tmp_path / "keys").write_text("# comment\n")
    assert run_here("serve", bundle, "--api-key-file", tmp_path / "keys").returncode == 2


def test_another_host_name_is_refused(server: Reached) -> None:
    before = counters(server).get('outrider_http_errors_total{status="403"}', 0)
    for name in ("evil.example", "evil.example:80", "[", ""):
        status, answer = post(server, "/v1/completions", b"{}", Host=name)
        assert (status, answer["error"]["code"]) == (403, "host_not_allowed")
    for name in ("localhost:1", "[::1]:9", "LOCALHOST"):
        status, answer = post(server, "/v1/completions", b"{", Host=name)
        assert (status, answer["error"]["message"]) == (400, "the body is not JSON")
    assert counters(server)['outrider_http_errors_total{status="403"}'] == before + 4


def test_limits(bundle: Path) -> None:
    options = ["--max-body", "2000", "--max-prompt", "20", "--max-waiting", "1", "--timeout", "1", "--model-name", "mine"]
    with serving(bundle, *options) as server:
        status, answer = post(server, "/v1/completions", json.dumps({"prompt": "x" * 3000}).encode())
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        chunked = iter([b'{"prompt": "', b"x" * 3000, b'"}'])  # without a Content-Length
        status, answer = post(server, "/v1/completions", chunked)  # type: ignore[arg-type]
        assert status == 413, answer
        status, answer = post(server, "/v1/completions", json.dumps({"prompt": "one two three " * 20}).encode())
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        long = json.dumps({"model": "mine", "prompt": "Once", "max_tokens": 480, "min_tokens": 480, "n": 2}).encode()
        with ThreadPoolExecutor(8) as pool:
            posted = [pool.submit(post, server, "/v1/completions", long) for _ in range(8)]
            time.sleep(0.2)
            server.process.send_signal(signal.SIGSTOP)  # so that answers take longer than a second on any machine
            time.sleep(1)
            server.process.send_signal(signal.SIGCONT)
            result = [each.result() for each in posted]
        assert {status for status, _ in result} <= {200, 429, 504}
        assert 429 in {status for status, _ in result}
        assert 504 in {status for status, _ in result}
        for _ in range(50):  # also after the last one timed out
            if counters(server)["outrider_num_requests_running"] == 0:
                break
            time.sleep(0.1)
        after = counters(server)
        assert after["outrider_num_requests_running"] == after["outrider_num_requests_waiting"] == 0
        assert after["outrider_kv_cache_usage"] == 0
        status, answer = post(server, "/v1/completions", b'{"prompt": "x", "n": 7}')
        assert status == 400
        assert "at once" in answer["error"]["message"]


def test_a_chat_template_can_be_given(tiny_bundle: Path) -> None:
    body = {"model": "target", "messages": [{"role": "user", "content": "the quick"}], "max_tokens": 4}
    with serving(tiny_bundle) as server:
        assert any("--chat-template FILE adds one" in line for line in server.log)
        status, answer = post(server, "/v1/chat/completions", json.dumps(body).encode())
        assert (status, "has no chat template" in answer["error"]["message"]) == (400, True)
    with serving_here(tiny_bundle, chat_template=TEMPLATE) as given:
        status, answer = post(given, "/v1/chat/completions", json.dumps(body).encode())
        assert (status, answer["usage"]["completion_tokens"]) == (200, 4)


def test_health_is_503_while_a_bundle_cannot_be_run(bundle: Path, tmp_path: Path) -> None:
    done = run_here("serve", bundle / "nothing")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    broken = tmp_path / "broken"
    subprocess.run(["cp", "-r", bundle, broken], check=True)
    with (broken / "target" / "model.onnx.data").open("r+b") as weights:
        weights.write(b"\0" * 64)
    server = Server(broken)
    try:
        for _ in range(100):
            status, answer = server.health()
            assert status == 503
            message = answer["error"]["message"]
            if "cannot be run" in message:
                break
            time.sleep(0.1)
        assert "model.onnx.data" in message
    finally:
        server.stop()


def test_replacing_a_bundle_does_not_change_a_running_server(bundle: Path, tmp_path: Path, alone: Outrider) -> None:
    """`build-engine` replaces a bundle by renaming, and a running server keeps the files that it opened."""
    copy = tmp_path / "bundle"
    subprocess.run(["cp", "-r", bundle, copy], check=True)
    with serving(copy) as server:
        copy.rename(tmp_path / "gone")
        subprocess.run(["cp", "-r", bundle, copy], check=True)
        subprocess.run(["rm", "-r", tmp_path / "gone"], check=True)
        body = json.dumps({"prompt": PROMPT, "temperature": 0, "max_tokens": 60}).encode()
        assert post(server, "/v1/completions", body)[1]["choices"][0]["text"] == text_of(alone, PROMPT, max_new_tokens=60)
        assert server.health()[0] == 200
    assert read_manifest(copy)
    assert sum("the bundle was replaced; this server keeps using the old one" in line for line in server.log) == 1


def test_changing_a_bundle_in_place_ends_in_errors_not_in_wrong_tokens(bundle: Path, tmp_path: Path, alone: Outrider) -> None:
    copy = tmp_path / "bundle"
    subprocess.run(["cp", "-r", bundle, copy], check=True)
    with serving(copy) as server:
        body = json.dumps({"prompt": PROMPT, "temperature": 0, "max_tokens": 480, "min_tokens": 480, "stream": True}).encode()
        request = urllib.request.Request(f"{server.url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as stream:
            lines = [stream.readline()]
            (weights,) = (copy / "target").glob("*.data")
            with open(weights, "r+b") as file:
                file.seek(weights.stat().st_size // 2)
                file.write(bytes(4096))
            lines += stream.read().splitlines()
        *chunks, last = [json.loads(line.removeprefix(b"data: ")) for line in lines if line.strip()]
        assert "was changed under the running server" in last["error"]["message"]
        text = "".join(each["choices"][0]["text"] for each in chunks)
        assert text_of(alone, PROMPT, max_new_tokens=480, min_new_tokens=480).startswith(text)
        assert server.health()[0] == 503
        assert post(server, "/v1/completions", body)[0] == 503


def test_sigterm_lets_answers_finish(bundle: Path, alone: Outrider) -> None:
    server = Server(bundle)
    server.ready()
    body = json.dumps({"prompt": PROMPT, "temperature": 0, "max_tokens": 300, "min_tokens": 300}).encode()
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(post, server, "/v1/completions", body) for _ in range(4)]
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        answers = [each.result() for each in running]
    want = text_of(alone, PROMPT, max_new_tokens=300, min_new_tokens=300)
    assert [status for status, _ in answers] == [200] * 4
    assert {answer["choices"][0]["text"] for _, answer in answers} == {want}
    assert server.process.wait(60) == 0
    server.stop()


@pytest.mark.parametrize(("drain", "signals"), [(0, ["SIGHUP"]), (60, ["SIGINT", "SIGHUP", "SIGINT"])])
def test_after_the_drain_time_clients_are_asked_to_retry(bundle: Path, drain: int, signals: list[str]) -> None:
    """A second SIGINT ends it."""
    server = Server(bundle, "--drain", str(drain))
    server.ready()
    body = {"prompt": PROMPT, "max_tokens": 480, "min_tokens": 480}
    bodies = [json.dumps(body | {"stream": stream}).encode() for stream in (False, True)]
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(post, server, "/v1/completions", bodies[0])
        request = urllib.request.Request(f"{server.url}/v1/completions", bodies[1], {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as stream:
            assert stream.readline()
            for each in signals:
                server.process.send_signal(signal.Signals[each])
                time.sleep(0.02)
            rest = stream.read().decode()
        status, answer = whole.result()
    assert (status, answer["error"]["code"]) == (503, "not_ready")
    assert json.loads(rest.strip().rsplit("data: ", 1)[1])["error"]["code"] == "not_ready"
    assert server.process.wait(60) == 0
    server.stop()
    assert "Aborted" not in "".join(server.log)


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_ends_a_server_that_is_starting(bundle: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    before = {each: signal.signal(each, signal.SIG_DFL) for each in ENDING}  # in the background, SIGINT is ignored
    monkeypatch.setattr("outrider.bundle.folder.read_manifest", lambda _: signal.raise_signal(number))
    try:
        done = run_here("serve", bundle)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_wrong_use_is_one_line_and_exit_code_2(bundle: Path) -> None:
    for options in (["--port", "99999"], ["--k", "many"], ["--timeout", "0"], ["--api-key-file", "/dev/null"]):
        done = run_here("serve", bundle, *options)
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith("error: ")
        assert "Traceback" not in done.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_API_KEYS", " ,")
        done = run_here("serve", bundle)
    assert done.returncode == 2
    assert "contains no key" in done.stderr
