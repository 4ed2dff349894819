"""The requests and responses of OpenAI's API, as far as this server supports them; anything else is refused by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from outrider.errors import UsageError
from outrider.runtime.grammar.structured import StructuredOutputs
from outrider.runtime.params import SamplingParams
from outrider.runtime.request import Event
from outrider.runtime.rounds.logprobs import Logprobs
from outrider.runtime.stats import Stats
from outrider.runtime.text.stream import TextStream
from outrider.runtime.text.text import Text

# The difference between the seeds of a request's choices: 2^64 divided by the golden ratio, which spreads them out.
SEED_STEP = 0x9E3779B97F4A7C15
# A body is checked in the event loop, and all streams wait meanwhile. So the number of its parts is limited, it is checked
# before they are, and a list is read up to its first error.
MAX_PROMPTS = 2048
MAX_PARTS = 2048  # of all messages of a chat; a message counts, too, and so does a tool call
MAX_TOOLS = 128  # as in OpenAI's API
MAX_DEPTH = 64  # of a schema
MAX_ENTRIES = 1024  # of an object


def _check_count(count: int, limit: int, things: str) -> None:
    if count > limit:
        context = {"count": f"{count:,}", "limit": f"{limit:,}", "things": things}
        raise PydanticCustomError("too_long", "there are {count} {things}; the limit is {limit}", context)


class Strict(BaseModel):
    """Part of a request: types are not converted, and the first unknown field is an error; a null counts as absent.

    What clients and their libraries send is in `no_effect` if the answer is the same without it: it is accepted with any value,
    and dropped. What would change the answer, if this server had it, is refused by name.
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


class JsonSchema(Strict):
    """A named schema; it is always followed strictly."""

    name: str
    description: str | None = None
    # A schema may have nulls, so it is taken as it is. `schema` itself is a method of pydantic's models.
    json_schema: dict[str, Any] = Field(default={}, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """What an answer has to be: any text, a JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is needed with the type json_schema, and with no other")
        return self


class StructuredOutputsBody(Strict):
    """What an answer has to be, in vLLM's form."""

    json_schema: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=MAX_ENTRIES)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Common(Strict):
    """The fields that both endpoints have.

    Beyond OpenAI's own: top_k, min_p, repetition_penalty, min_tokens, stop_token_ids, priority and structured_outputs (as in
    vLLM, which has also called the latter guided_json and so on), timeout, and return_origin, which adds to each choice its
    pieces of text and whether they were drafted.
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
    priority: int = 0
    timeout: float | None = Field(default=None, ge=1)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsBody | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(max_length=MAX_ENTRIES)] | None = None
    guided_grammar: str | None = None
    # Accepted with these values only, and without effect on the answer; a response may repeat the first two.
    user: str | None = None
    metadata: dict[str, str] = Field(default={}, max_length=MAX_ENTRIES)
    store: Literal[False] = False
    service_tier: Literal["auto", "default"] = "auto"

    @field_validator("logit_bias", "metadata", mode="before")
    @classmethod
    def _few_entries(cls, entries: Any) -> Any:
        if isinstance(entries, dict):
            _check_count(len(entries), MAX_ENTRIES, "entries")
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
            structured_outputs=self.structured(),
        )

    def structured(self) -> StructuredOutputs | None:
        """Return what the answers have to be, if that is restricted.

        Raises:
            UsageError: it is said in two ways, or in a wrong one.
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
        """Return what OpenAI's own field for it says that the answers have to be, as an argument of `StructuredOutputs`."""
        if self.response_format is None or self.response_format.type == "text":
            return {}
        schema = self.response_format.json_schema
        return {"json_object": True} if schema is None else {"json": schema.json_schema}

    def seeds(self) -> list[int | None]:
        """Return the seed of each choice; the first has the request's own."""
        return [None if self.seed is None else (self.seed + index * SEED_STEP) % 2**64 for index in range(self.n)]


def _kind_of_prompt(prompt: Any) -> str | None:
    """Return the tag of the type that a prompt should have, or None if its items are none of these or are mixed."""
    if not isinstance(prompt, list):
        return "str" if isinstance(prompt, str) else None
    first, *others = set(map(type, prompt)) or {str}
    return None if others else {str: "list[str]", int: "list[int]", list: "list[list[int]]"}.get(first)


TokenIds = Annotated[list[int], Field(fail_fast=True)]
Prompt = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag("list[str]")]
    | Annotated[TokenIds, Tag("list[int]")]
    | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag("list[list[int]]")],
    Discriminator(
        _kind_of_prompt,
        custom_error_type="prompt_type",
        custom_error_message="Input should be text, a list of texts, a list of token ids, or a list of such lists",
    ),
]


class CompletionRequest(Common):
    """The body of `POST /v1/completions`."""

    prompt: Prompt
    max_tokens: int = 16
    logprobs: int | None = None
    echo: Literal[False] = False
    best_of: int | None = None

    def texts(self) -> list[str]:
        """Return the prompts that are text."""
        return [self.prompt] if isinstance(self.prompt, str) else [each for each in self.prompt if isinstance(each, str)]

    def token_ids(self) -> list[list[int]]:
        """Return the prompts that are token ids; no others are beside them."""
        if isinstance(self.prompt, str):
            return []
        if isinstance(next(iter(self.prompt), 0), int):
            return [cast(list[int], self.prompt)]
        return [each for each in self.prompt if isinstance(each, list)]

    def check_best_of(self) -> None:
        """Check that no answers would have to be ranked.

        Raises:
            UsageError: `best_of` is neither absent nor `n`.
        """
        if self.best_of not in (None, self.n):
            raise UsageError(f"best_of is {self.best_of}; it must equal n", "use n alone", param="best_of")


class ContentPart(Strict):
    """A part of a message's content."""

    no_effect = frozenset({"cache_control", "prompt_cache_breakpoint"})

    type: Literal["text"]
    text: str


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]  # OpenAI's, and the dot that some frameworks use


class CalledFunction(Strict):
    """What an earlier call was."""

    no_effect = frozenset({"parsed_arguments"})

    name: ToolName
    arguments: str


class ToolCall(Strict):
    """An earlier call, in a message of the assistant. The index is that of a stream's delta."""

    no_effect = frozenset({"index", "extra_content", "provider_specific_fields"})

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    """A message of a chat. `reasoning` is vLLM's name of `reasoning_content`."""

    no_effect = frozenset({"annotations", "cache_control", "parsed", "provider_specific_fields"})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(default=None, exclude=True)
    tool_calls: list[ToolCall] = Field(default=[], fail_fast=True)
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _fields_of_the_role(self) -> Self:
        if self.reasoning_content is None:
            self.reasoning_content = self.reasoning
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content is not None):
            raise ValueError("tool_calls and reasoning_content are the assistant's")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id belongs to role tool, which needs it")
        if self.content is None and not self.tool_calls and self.reasoning_content is None:
            raise ValueError("a message without tool_calls needs content")
        return self

    @property
    def text(self) -> str:
        """The content as one text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())


def few_parts(messages: Any) -> Any:
    """Return messages, if they and their parts are not too many."""
    if isinstance(messages, list):
        lists = [
            each.get(key)
            for each in messages[:MAX_PARTS]
            if isinstance(each, dict)
            for key in ("content", "tool_calls", "output")
        ]
        parts = sum(len(each) for each in lists if isinstance(each, list))
        _check_count(len(messages) + parts, MAX_PARTS, "messages and parts of messages")
    return messages


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True), BeforeValidator(few_parts)]


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as chat templates expect them, but for the arguments of calls, which are text."""
    roles, names = {"developer": "system"}, dict[str | None, str]()
    made = []
    for message in messages:
        names |= {call.id: call.function.name for call in message.tool_calls}
        each: dict[str, Any] = {"role": roles.get(message.role, message.role), "content": message.text}
        if message.reasoning_content is not None:  # GPT-OSS calls it thinking
            each |= dict.fromkeys(("reasoning_content", "thinking"), message.reasoning_content)
        if message.tool_calls:
            each["tool_calls"] = [call.model_dump() for call in message.tool_calls]
        if message.role == "tool":
            name = names.get(message.tool_call_id, message.name)
            each |= {"tool_call_id": message.tool_call_id} | ({} if name is None else {"name": name})
        made.append(each)
    return made


def _shallow(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that JSON can hold: a response repeats it, and templates write it."""
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        if any(isinstance(each, float) and not math.isfinite(each) for each in level):
            raise PydanticCustomError("not_finite", "a schema has a number that is not finite")
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        if not (level := [value for values in inner for value in values]):
            return schema
    raise PydanticCustomError(
        "too_deep", "a schema has lists and objects within each other, more than {limit} deep", {"limit": MAX_DEPTH}
    )


def _of_an_object(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise PydanticCustomError("no_object", "the parameters of a function are those of an object")
    return schema


class Function(Strict):
    """A function that the model may call. Unless it is `strict`, its calls may ignore some keywords of its parameters."""

    name: ToolName
    description: str = ""
    parameters: Annotated[dict[str, Any], AfterValidator(_shallow), AfterValidator(_of_an_object)] = {
        "type": "object",
        "properties": {},
    }
    strict: bool = False

    def definition(self) -> dict[str, Any]:
        """Return the definition as chat templates expect it."""
        return {"type": "function", "function": self.model_dump(exclude={"strict"})}


class Tool(Strict):
    """A tool: a function."""

    no_effect = frozenset({"cache_control"})

    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class NamedFunction(Strict):
    """The function that the model has to call."""

    name: str


class NamedTool(Strict):
    """The tool that the model has to call."""

    type: Literal["function"]
    function: NamedFunction


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


def template_variables(effort: Effort | None, variables: dict[str, Any]) -> dict[str, Any]:
    """Return the chat template's variables: how much the model is to think, under the names that templates have for it, and
    those that the request sets itself."""
    made: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    return made | ({"enable_thinking": False} if effort == "none" else {}) | variables


class ChatRequest(Common):
    """The body of `POST /v1/chat/completions`."""

    no_effect = Common.no_effect | {"prediction", "verbosity"}
    renamed: ClassVar[dict[str, str]] = {
        "max_new_tokens": "max_completion_tokens",
        "min_new_tokens": "min_tokens",
        "logprobs": "top_logprobs",
        "prompt": "messages",
        "chat": "messages",
        "template_kwargs": "chat_template_kwargs",
    }

    messages: Messages
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: Tools = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] = Field(default={}, max_length=64)
    modalities: list[Literal["text"]] = []


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

    def __init__(self, text: Text, prompt: list[int]):
        """Begin at the start of the answer."""
        self._text, self._stream = text, TextStream(text.tokenizer, prompt, ())
        self._offset = 0

    def append(self, events: Sequence[Event]) -> dict[str, list[Any]]:
        """Return the logprobs of the next events' tokens; the token that ends a character has it whole, and special
        tokens have no text."""
        columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        pairs = [pair for event in events for pair in _with_logprobs(event)]
        for left, (token, logprobs) in enumerate(pairs, 1 - len(pairs)):
            pieces = self._stream.push(token, from_draft=False)
            if not left and events[-1].finish_reason is not None:
                pieces += self._stream.finish()
            text = "".join(piece for piece, _ in pieces)
            columns["tokens"].append(text)
            columns["token_logprobs"].append(logprobs.logprob)
            columns["top_logprobs"].append(self._top(logprobs))
            columns["text_offset"].append(self._offset)
            self._offset += len(text)
        return columns

    def _top(self, logprobs: Logprobs) -> dict[str, float]:
        """Return the most likely tokens, each under a name of its own."""
        top: dict[str, float] = {}
        for token, value in logprobs.top:
            name = _whole_or_bytes(self._text.token_bytes(token))
            top[f"token_id:{token}" if name in top else name] = value
        return top


def chat_logprobs(text: Text, events: Sequence[Event]) -> dict[str, Any]:
    """Return the logprobs of a chat's events."""

    def entry(token: int, value: float) -> dict[str, Any]:
        return {"token": text.token(token), "logprob": value, "bytes": list(text.token_bytes(token))}

    return {
        "content": [
            entry(token, logprobs.logprob) | {"top_logprobs": [entry(*pair) for pair in logprobs.top]}
            for event in events
            for token, logprobs in _with_logprobs(event)
        ]
    }


def _whole_or_bytes(token: bytes) -> str:
    """Return the text of a token or, in OpenAI's notation, its bytes if they are not whole characters."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _with_logprobs(event: Event) -> list[tuple[int, Logprobs]]:
    return list(zip(event.token_ids, event.logprobs or (), strict=True))


def finish_reason(reason: str | None) -> str | None:
    """Return OpenAI's name for a finish reason; it has none for a full cache."""
    return "length" if reason == "capacity" else reason
