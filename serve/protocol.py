"""The OpenAI API's requests and answers, as far as they are honoured here; what is not is refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from outrider.errors import UsageError
from outrider.runtime.generation import Event
from outrider.runtime.params import SamplingParams
from outrider.runtime.request import Logprobs
from outrider.runtime.stats import Stats
from outrider.runtime.text import Text

CHOICE_SEEDS = 0x9E3779B97F4A7C15  # between the seeds of a request's choices: 2^64 over the golden ratio, so they are far apart


class Strict(BaseModel):
    """A request's part: nothing is guessed, and nothing ignored but a null."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}


class StreamOptions(Strict):
    include_usage: bool = False


class Common(Strict):
    """What both endpoints take. Beyond OpenAI's own: top_k, min_p, repetition_penalty, min_tokens, stop_token_ids (as in vLLM),
    and return_origin, which adds to each chunk its pieces of text and whether they were drafted."""

    model: str | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = Field(default=1, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] = []
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[Annotated[int, Field(strict=False)], float] = Field(default={}, max_length=1024)
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: list[int] = Field(default=[], max_length=256)
    return_origin: bool = False
    # What changes no answer, and may be said.
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] = {}
    store: Literal[False] = False
    service_tier: Literal["auto", "default"] = "auto"

    @model_validator(mode="after")
    def _stream_options_of_streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self

    def params(self, most: int, logprobs: int | None) -> SamplingParams:
        """Raises `UsageError` where a value is out of range."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            seed=self.seed,
            max_new_tokens=most,
            min_new_tokens=self.min_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            logprobs=logprobs,
        )

    def seeds(self) -> list[int | None]:
        """Of each choice: the first has the request's own."""
        return [None if self.seed is None else (self.seed + at * CHOICE_SEEDS) % 2**64 for at in range(self.n)]


class CompletionRequest(Common):
    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int = 16
    logprobs: int | None = None
    echo: Literal[False] = False
    best_of: int | None = None

    def prompts(self, text: Text) -> list[list[int]]:
        """The token ids of each prompt."""
        given = self.prompt
        if isinstance(given, str):
            return [text.encode(given, chat=False)]
        if all(isinstance(each, int) for each in given):
            return [[each for each in given if isinstance(each, int)]]
        return [text.encode(each, chat=False) if isinstance(each, str) else each for each in given if not isinstance(each, int)]


class ContentPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]
    name: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ResponseFormat(Strict):
    type: Literal["text"]


class ChatRequest(Common):
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None

    def prompt(self, text: Text) -> list[int]:
        """The token ids of the messages in the chat template."""
        roles = {"developer": "system"}
        return text.encode_chat([{"role": roles.get(m.role, m.role), "content": m.text} for m in self.messages])


def usage(stats: Sequence[Stats], prompts: Sequence[int]) -> dict[str, Any]:
    """Of a request's answers; each prompt counts once, and so do its cached tokens, as the first of its answers had them."""
    prompt, completion = sum(prompts), sum(each.emitted for each in stats)
    each_has = max(len(stats) // max(len(prompts), 1), 1)
    cached = sum(each.cached_tokens for each in stats[::each_has])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def metrics(stats: Sequence[Stats]) -> dict[str, Any] | None:
    """What speculation did for one answer, in the shape that vLLM gives and AIPerf reads; for several there is none."""
    if len(stats) != 1:
        return None
    (one,) = stats
    return {
        "speculative_decoding": {
            "mean_acceptance_length": one.mean_acceptance_length,
            "draft_acceptance_rate": one.acceptance_rate,
            "acceptance_histogram": one.histogram,
            "num_spec_steps": one.drafting_rounds,
            "num_accepted_draft_tokens": one.accepted,
            "num_draft_tokens": one.drafted,
            "num_spec_tokens": len(one.drafted_at),
        }
    }


class CompletionLogprobs:
    """The logprobs of a completion, token by token."""

    def __init__(self, text: Text):
        self._text = text
        self._offset = 0

    def of(self, event: Event) -> dict[str, Any]:
        """Of an event's tokens."""
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, each in zip(event.token_ids, event.logprobs or (), strict=True):
            said = self._text.token(token)
            found["tokens"].append(said)
            found["token_logprobs"].append(each.logprob)
            found["top_logprobs"].append({self._text.token(other): value for other, value in each.top})
            found["text_offset"].append(self._offset)
            self._offset += len(said)
        return found


def chat_logprobs(text: Text, event: Event) -> dict[str, Any]:
    """The logprobs of a chat's event."""

    def entry(token: int, value: float) -> dict[str, Any]:
        said = text.token(token)
        return {"token": said, "logprob": value, "bytes": None if "\ufffd" in said else list(said.encode())}

    def whole(token: int, each: Logprobs) -> dict[str, Any]:
        return entry(token, each.logprob) | {"top_logprobs": [entry(*pair) for pair in each.top]}

    return {"content": [whole(token, each) for token, each in zip(event.token_ids, event.logprobs or (), strict=True)]}


def finish_reason(reason: str | None) -> str | None:
    """In OpenAI's words, which has none for a cache that is full."""
    return "length" if reason == "capacity" else reason


def check_best_of(request: CompletionRequest) -> None:
    """Raise `UsageError` where answers would have to be ranked."""
    if request.best_of not in (None, request.n):
        raise UsageError(f"best_of is {request.best_of}; it must be n", "give n alone")
