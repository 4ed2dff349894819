"""The body of `POST /v1/responses`, without the fields that need state on the server. These are refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Never, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from outrider.errors import UsageError
from outrider.serve.api.chat_protocol import (
    CalledFunction,
    Conversation,
    Effort,
    Function,
    Message,
    NamedFunction,
    ToolCall,
    ToolName,
    few_parts,
    template_messages,
)
from outrider.serve.api.protocol import MAX_TOOLS, Common, Schema, Strict, only_text


class InputText(Strict):
    """A part of a message or of a tool's output."""

    no_effect = frozenset({"annotations", "cache_control", "logprobs", "parsed", "prompt_cache_breakpoint"})

    type: Annotated[Literal["input_text", "output_text"], BeforeValidator(only_text)]
    text: str


Texts = str | Annotated[list[InputText], Field(fail_fast=True)]


def _joined(texts: Texts) -> str:
    return texts if isinstance(texts, str) else "".join(part.text for part in texts)


class Item(Strict):
    """The common fields of items."""

    no_effect = frozenset({"id", "status"})


class InputMessage(Item):
    """A message."""

    no_effect = Item.no_effect | {"phase"}

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Texts


class FunctionCall(Item):
    """An earlier call."""

    no_effect = Item.no_effect | {"parsed_arguments"}

    type: Literal["function_call"]
    call_id: str
    name: ToolName
    arguments: str


class FunctionCallOutput(Item):
    """The output of an earlier call."""

    no_effect = Item.no_effect | {"name"}

    type: Literal["function_call_output"]
    call_id: str
    output: Texts


class ReasoningText(Strict):
    """A part of the model's reasoning."""

    type: Literal["reasoning_text"]
    text: str


class Reasoning(Item):
    """The model's reasoning before its next message or call. Only the plain text is read, as this server returns it."""

    no_effect = Item.no_effect | {"encrypted_content", "summary"}

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] = Field(default=[])


def _kind_of_item(item: Any) -> str | None:
    return item.get("type", "message") if isinstance(item, dict) else None


Items = Annotated[
    list[
        Annotated[
            Annotated[InputMessage, Tag("message")]
            | Annotated[FunctionCall, Tag("function_call")]
            | Annotated[FunctionCallOutput, Tag("function_call_output")]
            | Annotated[Reasoning, Tag("reasoning")],
            Discriminator(
                _kind_of_item,
                custom_error_type="item_type",
                custom_error_message="Input should be a message, function_call, function_call_output or reasoning",
            ),
        ]
    ],
    Field(min_length=1, fail_fast=True),
    BeforeValidator(few_parts),
]


class Typed(Strict):
    """The type field of a function."""

    type: Literal["function"]


class FunctionTool(Function, Typed):
    """A tool: a function."""

    no_effect = frozenset({"cache_control"})


class NamedFunctionTool(NamedFunction, Typed):
    """The function that the model must call."""


class TextFormat(Strict):
    """The format of an answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    strict: bool = False

    @model_validator(mode="after")
    def _schema_of_its_type(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("type json_schema needs schema, and no other type may have it")
        return self


class TextOptions(Strict):
    """Options of the answer's text."""

    no_effect = frozenset({"verbosity"})

    format: TextFormat | None = None


class ReasoningOptions(Strict):
    """How much the model should reason. The output has the whole reasoning, so there is never a summary."""

    no_effect = frozenset({"generate_summary", "summary"})

    effort: Effort | None = None


# The additions to a response that a client may ask for, without effect: this server has no such tools, and the output has the
# reasoning as text anyway.
Includable = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


def _stateless(_: Any) -> Never:
    raise PydanticCustomError("stateful", "this server keeps no answers; send the whole conversation as input")


Stateless = Annotated[None, BeforeValidator(_stateless)]


def _not_stored(store: Any) -> Any:
    return _stateless(store) if store is True else store


class ResponsesRequest(Conversation):
    """The body of `POST /v1/responses`."""

    no_effect = Common.no_effect | {"max_tool_calls"}
    renamed: ClassVar[dict[str, str]] = {
        "max_new_tokens": "max_output_tokens",
        "min_new_tokens": "min_tokens",
        "prompt": "input",
        "chat": "input",
        "template_kwargs": "chat_template_kwargs",
    }

    input: str | Items
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(default=[])
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool = "auto"
    text: TextOptions | None = None
    reasoning: ReasoningOptions = Field(default=ReasoningOptions())
    truncation: Literal["auto", "disabled"] = "disabled"  # an input that is too long is refused with either
    include: Annotated[list[Includable], Field(max_length=16, fail_fast=True)] = Field(default=[])
    n: Literal[1] = 1
    response_format: None = None
    return_origin: Literal[False] = False
    store: Annotated[Literal[False], BeforeValidator(_not_stored)] = False
    background: Literal[False] = False
    previous_response_id: Stateless = None
    conversation: Stateless = None

    def format(self) -> dict[str, Any]:
        """Return the text's format as the response repeats it."""
        wanted = None if self.text is None else self.text.format
        return {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)

    def format_asked(self) -> dict[str, Any]:
        """Return the structured output that `text` asks for; see `Common.format_asked`."""
        wanted = None if self.text is None else self.text.format
        if wanted is None or wanted.type == "text":
            return {}
        return {"json_object": True} if wanted.schema_ is None else {"json": wanted.schema_}

    @property
    def functions(self) -> Sequence[Function]:
        """See `Conversation.functions`."""
        return self.tools

    @property
    def choice(self) -> str | NamedFunction:
        """See `Conversation.choice`."""
        return self.tool_choice

    @property
    def effort(self) -> Effort | None:
        """See `Conversation.effort`."""
        return self.reasoning.effort

    @property
    def max_new_tokens(self) -> int | None:
        """See `Conversation.max_new_tokens`."""
        return self.max_output_tokens

    def template_messages(self) -> list[dict[str, Any]]:
        """Return the instructions and the input; see `Conversation.template_messages`."""
        made = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        if isinstance(self.input, str):
            return template_messages([*made, Message(role="user", content=self.input)])
        thought: str | None = None
        for item in self.input:
            if isinstance(item, Reasoning):
                thought = (thought or "") + "".join(part.text for part in item.content) or None
                continue
            if isinstance(item, FunctionCallOutput):
                made.append(Message(role="tool", content=_joined(item.output), tool_call_id=item.call_id))
                thought = None
                continue
            if isinstance(item, InputMessage) and item.role != "assistant":
                made.append(Message(role=item.role, content=_joined(item.content)))
                thought = None  # of a turn that was cut before its answer
                continue
            # The assistant's text and calls in one turn form one message.
            if not made or made[-1].role != "assistant" or isinstance(item, InputMessage):
                made.append(Message(role="assistant", content="", reasoning_content=thought))
                thought = None
            if isinstance(item, InputMessage):
                made[-1].content = _joined(item.content)
            else:
                function = CalledFunction(name=item.name, arguments=item.arguments)
                made[-1].tool_calls.append(ToolCall(id=item.call_id, function=function))
        if not made:
            raise UsageError("the input has no message", "add one", param="chat")
        return template_messages(made)
