"""Clients that stream answers with a known text, and measure their times."""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from outrider.builder.workloads import load as read_workloads
from outrider.experiments.load_test.server import GOOD_KEY, Server
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams

PROMPTS = [
    "Customer: Hi, I would like to order a coffee.\nAgent:",
    "Customer: I need two tickets for the film tonight.\nAgent:",
    "Question: Tom has 5 apples and buys 7 more. How many apples does he have?\nAnswer:",
    '"""Write a function to add two numbers."""\ndef',
    "Once upon a time there was a little",
    "The old man walked along the road, and the dog ran on before him. " * 4,
]
TOKENS = (8, 24, 64)
SEEDS = (None, 1, 2)  # None is greedy
DISCONNECTING, SLOW = 0.05, 0.02  # shares of the requests


class Case(NamedTuple):
    """A request, and the expected text of the answer."""

    prompt: str | list[int]
    tokens: int
    seed: int | None
    expected: str


class Answer(NamedTuple):
    """The answer that a client received."""

    text: str
    tokens: int
    first: float  # seconds to the first token
    seconds: float
    gaps: list[float]  # seconds between chunks
    disconnected: bool  # whether the client left before the end


def cases(bundle: Path, seeds: Sequence[int | None], workloads: Path | None) -> list[Case]:
    """Return a case for every prompt, length and seed. The expected texts come from plain decoding, one at a time. Prompts are
    `PROMPTS`, or the first one of each workload in a file, as chats."""
    known = []
    with Outrider.load(bundle) as loaded:
        prompts: list[str | list[int]] = [*PROMPTS]
        if workloads is not None:
            prompts = [loaded.text.encode(each.prompt, chat=True) for each in read_workloads(workloads, each=1)]
        for prompt in prompts:
            for limit in TOKENS:
                for seed in seeds:
                    params = SamplingParams(max_new_tokens=limit, seed=seed, temperature=0.0 if seed is None else 1.0)
                    text = "".join(event.text for event in loaded.generate(prompt, params, k=0))
                    known.append(Case(prompt, limit, seed, text))
    return known


def ask(server: Server, case: Case, chance: random.Random | None) -> Answer:
    """Stream one answer. With `chance`, the client may disconnect before the end, or read slowly."""
    disconnects, slow = (chance.random() < DISCONNECTING, chance.random() < SLOW) if chance is not None else (False, False)
    body: dict[str, Any] = {"prompt": case.prompt, "max_tokens": case.tokens, "stream": True, "temperature": 0}
    body |= {"stream_options": {"include_usage": True}}
    if case.seed is not None:
        body |= {"seed": case.seed, "temperature": 1}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    started = time.perf_counter()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {GOOD_KEY}"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {response.read().decode()[:200]}")
    text, first, tokens, gaps, last = "", 0.0, 0, list[float](), 0.0
    for line in response:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        chunk, now = json.loads(line[6:]), time.perf_counter()
        if "error" in chunk:
            raise RuntimeError(chunk["error"]["message"])
        first = first or now - started
        if last:
            gaps.append(now - last)
        last = now
        text += "".join(choice["text"] for choice in chunk["choices"])
        tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
        if disconnects and text:
            break
        if slow:
            time.sleep(0.05)
    connection.close()
    return Answer(text, tokens, first, time.perf_counter() - started, [] if slow else gaps, disconnects)


def load(server: Server, cases: list[Case], clients: int, faults: bool) -> tuple[list[Answer], float, list[int]]:
    """Send all requests from several concurrent clients. With `faults`, some clients disconnect or read slowly.

    Returns the answers, the total seconds, and samples of the server's memory in bytes.
    """
    memory: list[int] = []
    finished: list[Answer] = []

    def send(numbered: tuple[int, Case]) -> Answer:
        number, case = numbered
        answer = ask(server, case, random.Random(number) if faults else None)
        finished.append(answer)
        if len(finished) % 20 == 0 or len(finished) == len(cases):
            memory.append(server.memory)
        return answer

    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(send, enumerate(cases)))
    return answers, time.perf_counter() - started, memory


def wrong_answers(requests: list[Case], answers: list[Answer]) -> list[str]:
    """Describe each answer that is not the expected text. If the client left, the answer must be the start of that text."""
    wrong = []
    for case, answer in zip(requests, answers, strict=True):
        if (not answer.disconnected and answer.text != case.expected) or not case.expected.startswith(answer.text):
            request = f"{case.prompt[:30]!r}, {case.tokens} tokens, seed {case.seed}"
            wrong.append(f"{request}: {answer.text!r} instead of {case.expected!r}")
    return wrong


def percentiles(values: list[float]) -> dict[str, float]:
    """Return p50, p90 and p99 of seconds, in milliseconds."""
    ordered = sorted(values)
    return {f"p{share}": 1000 * ordered[min(len(ordered) * share // 100, len(ordered) - 1)] for share in (50, 90, 99)}


def figures(answers: list[Answer], seconds: float) -> dict[str, Any]:
    """Return the figures of complete answers, in milliseconds and tokens per second."""
    whole = [answer for answer in answers if not answer.disconnected]
    return {
        "requests": len(answers),
        "seconds": seconds,
        "tokens_per_second": sum(answer.tokens for answer in whole) / seconds,
        "first_token": percentiles([answer.first for answer in whole]),
        "per_token": percentiles([(each.seconds - each.first) / (each.tokens - 1) for each in whole if each.tokens > 1]),
        "between_chunks": percentiles([gap for answer in whole for gap in answer.gaps]),
    }
