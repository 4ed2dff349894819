"""An engine that plays back rounds, and the server's own application over it, without a bundle."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx

from outrider.errors import OutriderError
from outrider.runtime.params import SamplingParams
from outrider.runtime.request import Request
from outrider.runtime.rounds.logprobs import Logprobs
from outrider.runtime.rounds.rounds import RoundResult
from outrider.runtime.rounds.sampling import SamplingState
from outrider.runtime.text.stream import TextStream
from outrider.serve.app import create_app
from outrider.serve.deliveries import Result
from outrider.serve.metrics import Metrics
from outrider.serve.settings import Settings
from outrider.serve.turns import Turns
from outrider.serve.workers.messages import PromptJob
from outrider.tests.serve.families import text_of

TEXT = text_of("hermes")
CAPACITY = 200
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


def ids(text: str) -> list[int]:
    return [*TEXT.tokenizer.encode(text, add_special_tokens=False).ids]


def rounds(tokens: Sequence[int], each: int = 3) -> list[RoundResult]:
    """Return rounds of `each` tokens. All but the last token of a round are drafted; logprobs follow from the ids."""
    cut = [[*tokens[at : at + each]] for at in range(0, len(tokens), each)]
    logprobs = [[Logprobs(-token, ((token, -token), (token + 1, -token - 1))) for token in part] for part in cut]
    return [RoundResult("model", part[:-1], part, of) for part, of in zip(cut, logprobs, strict=True)]


class Player:
    """Stands in for `EngineThread`: it answers each choice by rounds, then by an error if there is one, or by nothing."""

    def __init__(self, *answers: list[RoundResult], error: OutriderError | None = None, refusal: Exception | None = None):
        self.answers, self.error, self.refusal = answers, error, refusal
        self.metrics = Metrics()
        self.requests: list[Request] = []
        self.cancelled: list[Request] = []
        models = {"target": SimpleNamespace(source="some/model")}
        manifest = SimpleNamespace(generation=SimpleNamespace(eos_token_ids=[0]), models=models, roles=("target",))
        self.outrider = SimpleNamespace(text=TEXT, build=SimpleNamespace(capacity=CAPACITY), manifest=manifest)
        self.prompts = SimpleNamespace(encode=self._encode)
        self.grammars = SimpleNamespace(compile=self._compile)
        self.reading = self.compiling = Turns()

    def turn(self, turns: Turns, owner: Hashable) -> AbstractAsyncContextManager[None]:
        return turns.of(owner, 8, Counter())

    async def _compile(self, *_: object) -> None:
        pass

    async def _encode(self, job: PromptJob) -> list[list[int]]:
        if self.refusal is not None:
            raise self.refusal
        return [ids("Hi")] * max(len(job.texts), 1)

    async def submit(
        self,
        requests: Sequence[tuple[list[int], SamplingParams]],
        deliver: Callable[[int, Result], None],
        shown: Mapping[int, str],
        *_: Hashable,
    ) -> list[Request]:
        loop = asyncio.get_running_loop()
        for index, (prompt, params) in enumerate(requests):
            stream = TextStream(TEXT.tokenizer, prompt, params.stop_strings, shown)
            request = Request(prompt, params, SamplingState(params, prompt, [0], 512), stream, CAPACITY)
            request.stats.cached_tokens = 1
            self.requests.append(request)
            for result in self.answers[index % len(self.answers)]:
                if request.finish_reason is None:
                    logprobs = None if params.logprobs is None else result.logprobs
                    loop.call_soon(deliver, index, request.take(result._replace(logprobs=logprobs)))
            if self.error is not None:
                loop.call_soon(deliver, index, self.error)
        return self.requests

    def cancel(self, requests: Sequence[Request]) -> None:
        self.cancelled += requests


async def send(player: Any, path: str, fields: dict[str, Any], **settings: Any) -> httpx.Response:
    app = create_app(Settings(bundle=Path("none"), **settings), player)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        return await http.post(path, json=fields)


def ask(player: Any, path: str = COMPLETIONS, settings: dict[str, Any] | None = None, **fields: Any) -> tuple[int, Any]:
    """Return the status and body of a whole response."""
    response = asyncio.run(send(player, path, {"prompt": "Hi"} | fields if path == COMPLETIONS else fields, **(settings or {})))
    return response.status_code, response.json()


def stream(player: Any, path: str = COMPLETIONS, **fields: Any) -> list[Any]:
    """Return the chunks of a stream that ends as it has to."""
    fields = {"stream": True} | fields
    response = asyncio.run(send(player, path, {"prompt": "Hi"} | fields if path == COMPLETIONS else fields))
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def messages(text: str = "Hi") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}
