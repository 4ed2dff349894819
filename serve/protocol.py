"""The requests and responses of OpenAI's API, as far as this server supports them; anything else is refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from outrider.errors import UsageError
from outrider.runtime.params import SamplingParams
from outrider.runtime.request import Event
from outrider.runtime.sampling import Logprobs
from outrider.runtime.stats import Stats
from outrider.runtime.text import Text

# The difference between the seeds of a request's choices: 2^64 divided by the golden ratio, which spreads them out.
SEED_STEP = 0x9E3779B97F4A7C15


class Strict(BaseModel):
    """Part of a request: types are not converted, and unknown fields are errors; a null counts as absent."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool = False


class Common(Strict):
    """The fields that both endpoints have.

    Beyond OpenAI's own: top_k, min_p, repetition_penalty, min_tokens and stop_token_ids (as in vLLM), and return_origin, which
    adds to each choice its pieces of text and whether they were drafted.
    """

    renamed: ClassVar[dict[str, str]] = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}

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
    # Accepted, without effect on the answer.
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

    @classmethod
    def fields_by_param(cls) -> dict[str, str]:
        """Return the field that sets each parameter of the library."""
        return {name: name for name in cls.model_fields} | cls.renamed

    def params(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """Return the library's form of the parameters, with the first choice's seed.

        Raises:
            UsageError: a value is out of range.
        """
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
            max_new_tokens=max_tokens,
            min_new_tokens=self.min_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            logprobs=logprobs,
        )

    def seeds(self) -> list[int | None]:
        """Return the seed of each choice; the first has the request's own."""
        return [None if self.seed is None else (self.seed + index * SEED_STEP) % 2**64 for index in range(self.n)]


class CompletionRequest(Common):
    """The body of `POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int = 16
    logprobs: int | None = None
    echo: Literal[False] = False
    best_of: int | None = None

    def prompts(self, text: Text) -> list[list[int]]:
        """Return the token ids of each prompt.

        Raises:
            UsageError: a prompt is empty or is not text.
        """
        if isinstance(self.prompt, str):
            return [text.encode(self.prompt, chat=False)]
        if all(isinstance(each, int) for each in self.prompt):
            return [[each for each in self.prompt if isinstance(each, int)]]
        return [
            text.encode(each, chat=False) if isinstance(each, str) else each
            for each in self.prompt
            if not isinstance(each, int)
        ]

    def check_best_of(self) -> None:
        """Check that no answers would have to be ranked.

        Raises:
            UsageError: `best_of` is neither absent nor `n`.
        """
        if self.best_of not in (None, self.n):
            raise UsageError(f"best_of is {self.best_of}; it must equal n", "use n alone", param="best_of")


class ContentPart(Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]
    name: str | None = None

    @property
    def text(self) -> str:
        """The content as one text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ResponseFormat(Strict):
    """The only response format: text."""

    type: Literal["text"]


class ChatRequest(Common):
    """The body of `POST /v1/chat/completions`."""

    renamed: ClassVar[dict[str, str]] = {
        "max_new_tokens": "max_completion_tokens",
        "min_new_tokens": "min_tokens",
        "logprobs": "top_logprobs",
        "prompt": "messages",
        "chat": "messages",
    }

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None

    def prompt(self, text: Text) -> list[int]:
        """Return the token ids of the messages in the chat template.

        Raises:
            UsageError: there is no chat template, or it rejects the messages.
        """
        roles = {"developer": "system"}
        return text.encode_chat([{"role": roles.get(m.role, m.role), "content": m.text} for m in self.messages])


def usage(stats: Sequence[Stats], prompts: Sequence[int]) -> dict[str, Any]:
    """Return the token counts of a request.

    Args:
        stats: of each choice, prompt by prompt.
        prompts: tokens of each prompt. A prompt counts once, and so do its cached tokens, as its first choice found them.
    """
    prompt, completion = sum(prompts), sum(each.emitted for each in stats)
    choices_per_prompt = max(len(stats) // max(len(prompts), 1), 1)
    cached = sum(each.cached_tokens for each in stats[::choices_per_prompt])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def speculation_metrics(stats: Sequence[Stats]) -> dict[str, Any] | None:
    """Return the counters of speculative decoding for a single choice, in vLLM's form, which AIPerf reads; None for several."""
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
    """The logprobs of a completion's choice, event by event."""

    def __init__(self, text: Text):
        """Begin at the start of the answer."""
        self._text = text
        self._offset = 0

    def append(self, events: Sequence[Event]) -> dict[str, list[Any]]:
        """Return the logprobs of the next events' tokens."""
        columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, logprobs in (pair for event in events for pair in _with_logprobs(event)):
            text = self._text.token(token)
            columns["tokens"].append(text)
            columns["token_logprobs"].append(logprobs.logprob)
            columns["top_logprobs"].append({self._text.token(other): value for other, value in logprobs.top})
            columns["text_offset"].append(self._offset)
            self._offset += len(text)
        return columns


def chat_logprobs(text: Text, events: Sequence[Event]) -> dict[str, Any]:
    """Return the logprobs of a chat's events."""

    def entry(token: int, value: float) -> dict[str, Any]:
        shown = text.token(token)
        return {"token": shown, "logprob": value, "bytes": None if "\ufffd" in shown else list(shown.encode())}

    return {
        "content": [
            entry(token, logprobs.logprob) | {"top_logprobs": [entry(*pair) for pair in logprobs.top]}
            for event in events
            for token, logprobs in _with_logprobs(event)
        ]
    }


def _with_logprobs(event: Event) -> list[tuple[int, Logprobs]]:
    return list(zip(event.token_ids, event.logprobs or (), strict=True))


def finish_reason(reason: str | None) -> str | None:
    """Return OpenAI's name for a finish reason; it has none for a full cache."""
    return "length" if reason == "capacity" else reason
