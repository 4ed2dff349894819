"""Prompts that would stall a server: other clients go on, and the one that sent them gets an error."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from outrider.bundle.manifest import CHAT_TEMPLATE, TOKENIZER
from outrider.tests.serve.server import Reached, Server, chat_bundle, fetch, serving, serving_here
from outrider.tests.support import END, reseal, run, run_here

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
SLOW = "{% if messages[0].content == 'loop' %}" + LOOPS + "{% elif messages[0].content == 'power' %}"
SLOW += "{{ 9 ** (10 ** 9 * messages | length) }}"
SLOW += "{% elif messages[0].content == 'memory' %}{{ 'x' * 10 ** 11 }}{% endif %}"
TURNS = "{% for m in messages %}" + END + "{{ m.role }}: {{ m.content }}{% endfor %}"


def edited(trained_export: Path, tmp_path: Path, template: bytes, pattern: str = "") -> Path:
    """A bundle with another chat template, and perhaps a tokenizer with another pattern for words."""
    bundle = chat_bundle(trained_export, tmp_path / "bundle")
    (bundle / CHAT_TEMPLATE).write_bytes(template)
    if pattern:
        made = Tokenizer.from_file(str(bundle / TOKENIZER))
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        made.save(str(bundle / TOKENIZER))
    reseal(bundle)
    return bundle


def post(server: Reached, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    path = "chat/completions" if "messages" in body else "completions"
    status, _, answer = fetch(f"{server.url}/v1/{path}", json.dumps({"max_tokens": 3, "temperature": 0} | body).encode())
    return status, json.loads(answer)


def chat(server: Reached, content: str) -> tuple[int, dict[str, Any]]:
    return post(server, {"messages": [{"role": "user", "content": content}]})


def failed_health(server: Reached) -> tuple[int, dict[str, Any]]:
    """Wait until the server says that its bundle cannot be run, and return that answer, or else the last one."""
    for _ in range(300):
        status, answer = server.health()
        if "cannot be run" in answer["error"]["message"]:
            break
        time.sleep(0.1)
    return status, answer


def resident(server: Server) -> int:
    """The bytes that the server and its children hold."""
    process = psutil.Process(server.process.pid)
    return sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))


def test_long_prompts_are_refused_at_no_cost(trained_export: Path, tmp_path: Path) -> None:
    """They come from several clients, back to back; what the server holds does not grow, and it answers others at once."""
    with serving(edited(trained_export, tmp_path, TURNS.encode())) as server, ThreadPoolExecutor(4) as pool:
        body = {"prompt": "a\u0301\u0302" * 70_000}
        status, answer = post(server, body)
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "context_length_exceeded", "prompt")
        before = resident(server)
        hostile = [pool.submit(post, server, body) for _ in range(20)]
        while not all(each.done() for each in hostile):
            assert server.health()[0] == 200
            assert post(server, {"prompt": "Once"})[0] == 200
        assert {each.result()[0] for each in hostile} == {400}
        assert resident(server) < before + (100 << 20)
        status, answer = chat(server, "x" * 900_000)
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "context_length_exceeded", "messages")


@pytest.mark.parametrize("content", ["memory", *(pytest.param(each, marks=pytest.mark.slow) for each in ("loop", "power"))])
def test_a_template_that_never_ends_is_ended(trained_export: Path, tmp_path: Path, content: str) -> None:
    with serving(edited(trained_export, tmp_path, (SLOW + TURNS).encode())) as server, ThreadPoolExecutor(1) as pool:
        assert chat(server, "Hi")[0] == 200
        stuck = pool.submit(chat, server, content)
        while not stuck.done():
            assert server.health()[0] == 200
            assert post(server, {"prompt": [5, 6, 7]})[0] == 200
            time.sleep(0.1)
        status, answer = stuck.result()
        assert status in (400, 500), answer
        assert answer["error"]["message"]
        assert (content == "memory") or (status, "takes longer" in answer["error"]["message"]) == (400, True)
        assert chat(server, "Hi")[0] == 200
        assert len(psutil.Process(server.process.pid).children()) == 1


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        pytest.param(LOOPS.encode(), "the chat template takes longer than 5 seconds", marks=pytest.mark.slow),
        (b"\xff{{ messages }}", "can't decode byte 0xff"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_at_the_start(
    trained_export: Path, tmp_path: Path, template: bytes, reason: str
) -> None:
    bundle = edited(trained_export, tmp_path, template)
    server = Server(bundle)
    try:
        status, answer = failed_health(server)
        assert status == 503
        assert reason in answer["error"]["message"]
    finally:
        server.stop()
    (line,) = (json.loads(each) for each in server.log if "could not be loaded" in each)
    assert reason in line["error"]
    assert line["hint"]
    assert "Traceback" not in "".join(server.log)
    if "decode" in reason:
        done = run_here("generate", bundle, "--prompt", "Once")
        assert (done.returncode, done.stdout) == (1, "")
        error, hint = (each for each in done.stderr.splitlines() if not each.endswith("..."))
        assert (error[:7], reason in error, hint[:6]) == ("error: ", True, "hint: ")


def test_a_tokenizer_that_crashes_is_one_error(trained_export: Path, tmp_path: Path) -> None:
    bundle = edited(trained_export, tmp_path, TURNS.encode(), r"(a+)+$")
    with serving(bundle) as server:
        for body in ({"prompt": "a" * 40 + "b"}, {"messages": [{"role": "user", "content": "a" * 40 + "b"}]}):
            status, answer = post(server, body)
            assert (status, "tokenizer fails" in answer["error"]["message"]) == (400, True), answer
        assert chat(server, "Hi")[0] == 200
    assert "panicked" not in "".join(server.log)
    for prompt, message in (("a" * 40 + "b", "tokenizer fails"), (" " * 12_000_000, "the prompt has at least")):
        done = run("generate", bundle, input=prompt)
        assert (done.returncode, done.stdout) == (2, "")
        error, hint = (each for each in done.stderr.splitlines() if not each.endswith("..."))
        assert message in error
        assert hint.startswith("hint:  --prompt: ")


def test_a_tokenizer_that_crashes_on_the_answer_is_one_error(trained_export: Path, tmp_path: Path) -> None:
    """Its decoder makes one space of any text, and takes two from the end."""
    bundle = edited(trained_export, tmp_path, TURNS.encode())
    description = json.loads((bundle / TOKENIZER).read_text())
    space = {"type": "Replace", "pattern": {"Regex": r"[\s\S]+"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 0, "stop": 2}
    description["decoder"] = {"type": "Sequence", "decoders": [description["decoder"], space, strip]}
    (bundle / TOKENIZER).write_text(json.dumps(description))
    reseal(bundle)
    done = run_here("generate", bundle, "--prompt", " ")
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "error: the tokenizer fails on the answer: " in done.stderr
    server = Server(bundle)
    try:
        status, answer = failed_health(server)
        assert (status, "the tokenizer fails on the answer" in answer["error"]["message"]) == (503, True)
    finally:
        server.stop()


def test_the_process_that_reads_prompts_may_be_killed_while_it_is_idle(trained_export: Path, tmp_path: Path) -> None:
    """As the system does when memory is short."""
    with serving(edited(trained_export, tmp_path, TURNS.encode())) as server:
        for _ in range(2):
            (child,) = psutil.Process(server.process.pid).children()
            child.kill()
            while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:  # until the server looks after it
                time.sleep(0.01)
            assert post(server, {"prompt": "Once"})[0] == 200
    assert "Traceback" not in "".join(server.log)


def test_a_second_owners_prompts_are_read_while_the_first_one_fills_the_queue(trained_export: Path, tmp_path: Path) -> None:
    bundle = edited(trained_export, tmp_path, TURNS.encode())
    keys = {name: f"Bearer {name}-key" for name in ("greedy", "second")}

    def ask(name: str, tokens: int) -> int:
        body = json.dumps({"prompt": "Once", "max_tokens": tokens, "min_tokens": tokens}).encode()
        return fetch(f"{server.url}/v1/completions", body, Authorization=keys[name])[0]

    with (
        serving_here(bundle, max_waiting=12, keys=("greedy-key", "second-key")) as server,
        ThreadPoolExecutor(24) as pool,
    ):
        greedy = [pool.submit(ask, "greedy", 200) for _ in range(16)]
        time.sleep(0.5)
        second = [pool.submit(ask, "second", 2) for _ in range(4)]
        assert [each.result() for each in second] == [200] * 4
        assert {each.result() for each in greedy} <= {200, 429}


def test_requests_whose_prompts_are_being_read_count_as_waiting(
    trained_export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.serve.workers.prompts.JOB_SECONDS", 2.5)
    bundle = edited(trained_export, tmp_path, (SLOW + TURNS).encode())
    with serving_here(bundle, max_waiting=2) as server, ThreadPoolExecutor(16) as pool:
        before = psutil.Process().children()
        first = pool.submit(chat, server, "loop")
        time.sleep(0.5)
        others = list(pool.map(lambda _: chat(server, "Hi")[0], range(14)))
        assert sorted(set(others)) == [200, 429]
        assert others.count(429) >= 14 - (2 + 4)
        status, answer = first.result()
        assert (status, "takes longer" in answer["error"]["message"]) == (400, True)
        assert psutil.Process().children() == before  # with the one that they are forked from


def test_prompts_take_no_longer_than_the_timeout(trained_export: Path, tmp_path: Path) -> None:
    bundle = edited(trained_export, tmp_path, (SLOW + TURNS).encode())
    with serving_here(bundle, timeout=2) as server:
        status, answer = chat(server, "loop")
        assert (status, answer["error"]["code"]) == (504, "timeout")


@pytest.mark.parametrize("allowed", [False, True])
def test_special_tokens_in_messages_are_text_unless_they_are_allowed(
    trained_export: Path, tmp_path: Path, allowed: bool
) -> None:
    bundle = edited(trained_export, tmp_path, TURNS.encode())
    made = Tokenizer.from_file(str(bundle / TOKENIZER))
    own = len(made.encode(f"{END}user: ").ids)
    written = 1 if allowed else len(made.encode(END.replace("<", "<\u200b")).ids) - len(made.encode("\u200b").ids)
    with serving_here(bundle, allow_special_tokens=allowed) as server:
        status, answer = chat(server, END)
        assert status == 200, answer
        assert abs(answer["usage"]["prompt_tokens"] - own - written) <= (0 if allowed else 2)
        status, answer = post(server, {"prompt": END})
        assert answer["usage"]["prompt_tokens"] == 1  # a plain prompt may have special tokens
    done = run_here("generate", bundle, "--prompt", "Once", "--allow-special-tokens")
    assert (done.returncode, "needs --chat" in done.stderr) == (2, True)
