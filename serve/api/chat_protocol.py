"""The messages and tools of a conversation, and the body of `POST /v1/chat/completions`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from outrider.serve.api.protocol import MAX_PARTS, MAX_TOOLS, Common, Schema, Strict, check_count, only_text


class ContentPart(Strict):
    """A part of a message's content."""

    no_effect = frozenset({"cache_control", "prompt_cache_breakpoint"})

    type: Annotated[Literal["text"], BeforeValidator(only_text)]
    text: str


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]  # OpenAI's pattern, plus the dot that some frameworks use


class CalledFunction(Strict):
    """The function of an earlier call."""

    no_effect = frozenset({"parsed_arguments"})

    name: ToolName
    arguments: str


class ToolCall(Strict):
    """An earlier call in a message of the assistant. `index` comes from a stream's delta."""

    no_effect = frozenset({"index", "extra_content", "provider_specific_fields"})

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    """A message of a chat. `reasoning` is vLLM's name for `reasoning_content`."""

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
            raise ValueError("only assistant messages may have tool_calls and reasoning_content")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("messages with role tool need tool_call_id, and no others may have it")
        if self.content is None and not self.tool_calls and self.reasoning_content is None:
            raise ValueError("a message without tool_calls needs content")
        return self

    @property
    def text(self) -> str:
        """The content as one text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())


def few_parts(messages: Any) -> Any:
    """Return messages after checking that they and their parts are not too many."""
    if isinstance(messages, list):
        lists = [
            each.get(key)
            for each in messages[:MAX_PARTS]
            if isinstance(each, dict)
            for key in ("content", "tool_calls", "output")
        ]
        parts = sum(len(each) for each in lists if isinstance(each, list))
        check_count(len(messages) + parts, MAX_PARTS, "messages and parts of messages")
    return messages


MessageList = Annotated[list[Message], Field(min_length=1, fail_fast=True), BeforeValidator(few_parts)]


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as chat templates expect them, except that the arguments of calls are still text."""
    roles, names = {"developer": "system"}, dict[str | None, str]()
    made = []
    for message in messages:
        names |= {call.id: call.function.name for call in message.tool_calls}
        each: dict[str, Any] = {"role": roles.get(message.role, message.role), "content": message.text}
        if message.reasoning_content is not None:  # the template of GPT-OSS calls it thinking
            each |= dict.fromkeys(("reasoning_content", "thinking"), message.reasoning_content)
        if message.tool_calls:
            each["tool_calls"] = [call.model_dump() for call in message.tool_calls]
        if message.role == "tool":
            name = names.get(message.tool_call_id, message.name)
            each |= {"tool_call_id": message.tool_call_id} | ({} if name is None else {"name": name})
        made.append(each)
    return made


def _of_an_object(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise PydanticCustomError("no_object", "the parameters of a function must be a schema of type object")
    return schema


class Function(Strict):
    """A function that the model may call. Unless it is `strict`, its calls may ignore some keywords of its parameters."""

    name: ToolName
    description: str = ""
    parameters: Annotated[Schema, AfterValidator(_of_an_object)] = Field(default={"type": "object", "properties": {}})
    strict: bool = False

    def definition(self) -> dict[str, Any]:
        """Return the definition as chat templates expect it."""
        return {"type": "function", "function": self.model_dump(include={"name", "description", "parameters"})}


class Tool(Strict):
    """A tool: a function."""

    no_effect = frozenset({"cache_control"})

    type: Literal["function"]
    function: Function


ToolList = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class NamedFunction(Strict):
    """The function that the model must call."""

    name: str


class NamedTool(Strict):
    """The tool that the model must call."""

    type: Literal["function"]
    function: NamedFunction


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class Conversation(Common):
    """The common fields of chats and responses."""

    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default={}, max_length=64)

    @abstractmethod
    def template_messages(self) -> list[dict[str, Any]]:
        """Return the messages as chat templates expect them, except that the arguments of calls are still text.

        Raises:
            UsageError: there is no message.
        """

    @property
    @abstractmethod
    def functions(self) -> Sequence[Function]:
        """The functions that the model may call."""

    @property
    @abstractmethod
    def choice(self) -> str | NamedFunction:
        """Whether the model calls a function: "none", "auto" or "required"; or the function that it must call."""

    @property
    @abstractmethod
    def effort(self) -> Effort | None:
        """How much the model should reason."""

    @property
    @abstractmethod
    def max_new_tokens(self) -> int | None:
        """The maximum length of an answer; None lets it fill the cache."""

    @property
    def candidates(self) -> int | None:
        """The number of candidates with logprobs for each token; None returns no logprobs."""
        return None

    def template_kwargs(self) -> dict[str, Any]:
        """Return the chat template's variables: the effort, under the names that templates use, and the request's own."""
        made: dict[str, Any] = {} if self.effort is None else {"reasoning_effort": self.effort}
        return made | ({"enable_thinking": False} if self.effort == "none" else {}) | self.chat_template_kwargs


class ChatRequest(Conversation):
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

    messages: MessageList
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: ToolList = Field(default=[])
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    reasoning_effort: Effort | None = None
    modalities: list[Literal["text"]] = Field(default=[])

    def template_messages(self) -> list[dict[str, Any]]:
        """See `Conversation.template_messages`."""
        return template_messages(self.messages)

    @property
    def functions(self) -> Sequence[Function]:
        """See `Conversation.functions`."""
        return [tool.function for tool in self.tools]

    @property
    def choice(self) -> str | NamedFunction:
        """See `Conversation.choice`."""
        return self.tool_choice.function if isinstance(self.tool_choice, NamedTool) else self.tool_choice

    @property
    def effort(self) -> Effort | None:
        """See `Conversation.effort`."""
        return self.reasoning_effort

    @property
    def max_new_tokens(self) -> int | None:
        """See `Conversation.max_new_tokens`."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def candidates(self) -> int | None:
        """See `Conversation.candidates`."""
        return (self.top_logprobs or 0) if self.logprobs else None
