"""The fields of OpenAI's API that this server supports. Any other field is refused by name."""

from __future__ import annotations

import math
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from outrider.errors import UsageError
from outrider.runtime.grammar.structured import StructuredOutputs
from outrider.runtime.params import SamplingParams

# The difference between the seeds of a request's choices: 2^64 divided by the golden ratio, which spreads them out.
SEED_STEP = 0x9E3779B97F4A7C15
# A body is checked in the event loop, and all streams wait in the meantime. So the number of its parts is limited and checked
# first, and a list is read only up to its first error.
MAX_PROMPTS = 2048
MAX_PARTS = 2048  # of all messages of a chat; messages and tool calls count as parts
MAX_TOOLS = 128  # as in OpenAI's API
MAX_DEPTH = 64  # of a schema
MAX_ENTRIES = 1024  # of an object


# Types of parts of a message that are not text, in the APIs for chats and for responses.
NOT_TEXT = ("image_url", "input_audio", "video_url", "audio_url", "file", "input_image", "input_file", "input_video")


def only_text(kind: Any) -> Any:
    """Return the type of a part of a message, after checking that it is none that only multimodal models read."""
    if kind in NOT_TEXT:
        raise PydanticCustomError("not_text", "this model reads text only; images, sound and files are refused")
    return kind


def check_count(count: int, limit: int, things: str) -> None:
    if count > limit:
        context = {"count": f"{count:,}", "limit": f"{limit:,}", "things": things}
        raise PydanticCustomError("too_long", "there are {count} {things}; the limit is {limit}", context)


class Strict(BaseModel):
    """Part of a request. Types are not converted, the first unknown field is an error, and a null counts as absent.

    `no_effect` has fields that clients send and that do not change the answer. They are accepted with any value, and dropped.
    An unsupported field that would change the answer is refused by name.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    no_effect: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        names = {field.alias or name for name, field in cls.model_fields.items()}
        fields = {name: values[name] for name in names if values.get(name) is not None}
        known = names | cls.no_effect
        unknown = (name for name, value in values.items() if name not in known and value is not None)
        return fields | dict.fromkeys(islice(unknown, 1))


class StreamOptions(Strict):
    """Options of a stream."""

    no_effect = frozenset({"include_obfuscation"})

    include_usage: bool = False


def _shallow(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema after checking that it can be written as JSON, because responses and chat templates contain it."""
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        if any(isinstance(each, float) and not math.isfinite(each) for each in level):
            raise PydanticCustomError("not_finite", "a schema has a number that is not finite")
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        if not (level := [value for values in inner for value in values]):
            return schema
    raise PydanticCustomError("too_deep", "a schema is nested too deeply; the limit is {limit} levels", {"limit": MAX_DEPTH})


# A dictionary, because nulls in a schema have a meaning.
Schema = Annotated[dict[str, Any], AfterValidator(_shallow)]


class JsonSchema(Strict):
    """A named schema. It is always enforced, whatever `strict` is."""

    name: str
    description: str | None = None
    json_schema: Schema = Field(default={}, alias="schema")  # `schema` is a method of pydantic's models
    strict: bool | None = None


class ResponseFormat(Strict):
    """The format of an answer: any text, a JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("type json_schema needs json_schema, and no other type may have it")
        return self


class StructuredOutputsBody(Strict):
    """The structured output that a request asks for, in vLLM's form."""

    json_schema: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=MAX_ENTRIES)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Common(Strict):
    """The fields that all endpoints share.

    These are not OpenAI's: top_k, min_p, repetition_penalty, min_tokens, stop_token_ids, priority and structured_outputs, which
    are vLLM's; guided_json and so on, which are vLLM's older names for structured_outputs; timeout; memory,
    which is whether to draft from the client's earlier requests and to remember this one; and return_origin, which adds to each
    choice its pieces of text and whether they were drafted.
    """

    renamed: ClassVar[dict[str, str]] = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
    no_effect = frozenset({"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"})

    model: str | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = Field(default=1, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | Annotated[list[str], Field(max_length=16, fail_fast=True)] = []
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[Annotated[int, Field(strict=False)], float] = Field(default={}, max_length=MAX_ENTRIES)
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: list[int] = Field(default=[], max_length=256, fail_fast=True)
    return_origin: bool = False
    memory: bool = True
    priority: int = 0
    timeout: float | None = Field(default=None, ge=1)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsBody | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(max_length=MAX_ENTRIES)] | None = None
    guided_grammar: str | None = None
    # These do not change the answer, and are accepted with these values only. A response may repeat the first two.
    user: str | None = None
    metadata: dict[str, str] = Field(default={}, max_length=MAX_ENTRIES)
    store: Literal[False] = False
    service_tier: Literal["auto", "default"] = "auto"

    @field_validator("logit_bias", "metadata", mode="before")
    @classmethod
    def _few_entries(cls, entries: Any) -> Any:
        if isinstance(entries, dict):
            check_count(len(entries), MAX_ENTRIES, "entries")
        return entries

    @model_validator(mode="after")
    def _stream_options_of_streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self

    @classmethod
    def fields_by_param(cls) -> dict[str, str]:
        """Return the field that sets each parameter of the library."""
        return {name: name for name in cls.model_fields} | cls.renamed

    def params(self, max_tokens: int, logprobs: int | None, structured: StructuredOutputs | None) -> SamplingParams:
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
            structured_outputs=structured,
            memory=self.memory,
        )

    def structured(self) -> StructuredOutputs | None:
        """Return the structured output that the request asks for, if any.

        Raises:
            UsageError: the request asks for two kinds, or for an invalid one.
        """
        asked = self.structured_outputs
        forms = [] if asked is None else [*asked.model_dump(by_alias=True).items()]
        forms += [(name, getattr(self, f"guided_{name}")) for name in ("json", "regex", "choice", "grammar")]
        given = [(name, value) for name, value in (*forms, *self.format_asked().items()) if value not in (None, False)]
        if len(given) > 1:
            kinds = ", ".join(name for name, _ in given)
            raise UsageError(
                f"{len(given)} kinds of structured output are given: {kinds}", "give one of them", param="structured_outputs"
            )
        return StructuredOutputs(**dict(given)) if given or asked is not None else None

    def format_asked(self) -> dict[str, Any]:
        """Return the structured output in OpenAI's own field, as an argument of `StructuredOutputs`."""
        if self.response_format is None or self.response_format.type == "text":
            return {}
        schema = self.response_format.json_schema
        return {"json_object": True} if schema is None else {"json": schema.json_schema}

    def seeds(self) -> list[int | None]:
        """Return the seed of each choice; the first has the request's seed."""
        return [None if self.seed is None else (self.seed + index * SEED_STEP) % 2**64 for index in range(self.n)]
