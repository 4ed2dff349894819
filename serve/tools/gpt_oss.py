"""The calls of GPT-OSS, whose answers are messages in channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.serve.tools.base import (
    AnswerParts,
    Family,
    OfferedTools,
    Part,
    Reader,
    arguments,
    json_value,
    mark,
    one_of,
    quoted,
    text_without,
)

START, END, MESSAGE, CHANNEL, CONSTRAIN = "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"
TO = " to=functions."


class GptOss(Family):
    """An answer is a list of messages. The channel `analysis` has the reasoning, `final` the text for the user, and
    `commentary` calls and the text before them: `<|channel|>analysis<|message|>Well.<|end|><|start|>assistant<|channel|>
    commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}`."""

    tokens = (START, END, MESSAGE, CHANNEL, CONSTRAIN)
    reads_every_answer = True

    @staticmethod
    def recognizes(template: str) -> bool:
        """Return whether a template writes such messages."""
        return CHANNEL in template and MESSAGE in template

    @property
    def opening(self) -> list[int]:
        """Tokens that start a call."""
        return [*self._tokenizer.encode(TO, add_special_tokens=False).ids]

    def grammar(self, offer: OfferedTools) -> str:
        """Return the grammar: reasoning and text before a call, then a call or the last message to the user."""
        begin, end, message, channel, constrain = (f"<[{token}]>" for token in map(self.token, self.tokens))
        text = text_without(offer, *map(self.token, self.tokens))
        form = f'(" "? ({constrain} "json")? | " json")'  # without its space, "json" would be part of the name
        each = []
        for name, schema in offer.tools.items():
            recipient = quoted(TO + name)  # the model may write it before the channel
            head = f'({channel} "commentary" {recipient} | {recipient} {channel} "commentary")'
            each.append(f"{head} {form} {message} {json_value(arguments(schema))}")
        return "\n".join(
            [
                f"start: before* {'call' if offer.required else '(call | final)'}",
                f'before: {channel} ("analysis" | "commentary") {message} {text} {end} {begin} "assistant"',
                f'final: {channel} "final" {message} {text if offer.said is None else offer.said}',
                f"call: {one_of(each)}",
            ]
        )

    def read(self, reader: Reader, tools: Mapping[str, dict[str, Any]]) -> AnswerParts:
        """Yield the parts of an answer."""
        recipient = yield from reader.starts(TO)
        if not recipient and not (yield from reader.starts(mark(CHANNEL))):  # a model that does not write channels
            yield from reader.rest()
        before = TO if recipient else ""
        while (head := (yield from reader.word(mark(MESSAGE)))) is not None:
            head, before = before + head, ""
            name = head.partition(TO)[2].split(mark(CHANNEL))[0].split(mark(CONSTRAIN))[0].split(" ")[0]
            if name in tools:
                yield Part("name", name)
                yield from reader.value()
                return
            if not (yield from reader.until(mark(END), "reasoning_content" if "analysis" in head else "content")):
                return
