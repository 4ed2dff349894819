"""What an operator relies on: limits, keys, clients that leave, bundles that change, and the end of a server."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from outrider.bundle.folder import read_manifest
from outrider.runtime.generation import Outrider
from outrider.serve.network.signals import ENDING
from outrider.tests.serve.server import (
    PROMPT,
    TEMPLATE,
    Reached,
    Server,
    counters,
    post,
    serving,
    serving_here,
    text_of,
)
from outrider.tests.support import ROOT, run_here


def test_the_dashboard_and_the_documents_name_existing_metrics(client: openai.OpenAI, server: Reached) -> None:
    client.completions.create(model="target", prompt=PROMPT, max_tokens=40, temperature=0)  # some metrics begin with an answer
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
    body = {"model": "target", "messages": [{"role": "user", "content": "the quick"}], "max_tokens": 4, "min_tokens": 4}
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
