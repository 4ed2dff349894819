"""Text in and out: the prompt's tokens, and confirmed tokens as text that never has to be taken back."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from outrider.bundle.manifest import CHAT_TEMPLATE, TOKENIZER, Manifest
from outrider.errors import FolderError, UsageError

PRIMED = 64  # tokens of the prompt; no character is longer, and undecodable runs cost the square of their length

Piece = tuple[str, bool]
"""Text, and whether the token that completed it came from the draft."""


class Text:
    """A bundle's tokenizer and chat template."""

    def __init__(self, folder: Path, manifest: Manifest):
        """Raises `FolderError` where the tokenizer cannot be read."""
        try:
            self.tokenizer: Any = Tokenizer.from_file(str(folder / TOKENIZER))
            self.tokenizer.no_truncation()  # some checkpoints' files cut every text, in silence
            self.tokenizer.no_padding()
        except Exception as error:  # tokenizers raises bare Exceptions
            raise FolderError(f"{folder / TOKENIZER} cannot be read: {error}", "make the bundle again") from error
        self._special_tokens = manifest.generation.special_tokens
        template = folder / CHAT_TEMPLATE
        self._template = template.read_text(encoding="utf-8") if CHAT_TEMPLATE in manifest.files else None

    def encode(self, prompt: str, *, chat: bool) -> list[int]:
        """The tokens of a prompt, as it stands or as a user's message in the chat template.

        Raises:
            UsageError: the prompt is empty, is not text, or the bundle has no chat template.
        """
        if not prompt:
            raise UsageError("the prompt is empty", "give some text with --prompt or on standard input")
        if chat:
            return self.encode_chat([{"role": "user", "content": prompt}])
        return self._encode(prompt, special=True)

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """The tokens of messages in the chat template.

        Raises:
            UsageError: there is no chat template, it refuses the messages, or they are not text.
        """
        return self._encode(self.render(messages), special=False)

    def _encode(self, prompt: str, special: bool) -> list[int]:
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError("the prompt is not UTF-8 text", "convert it to UTF-8") from error
        tokens: list[int] = self.tokenizer.encode(prompt, add_special_tokens=special).ids
        if not tokens:
            raise UsageError("the prompt has no tokens", "give some more text")
        return tokens

    def token(self, token: int) -> str:
        """The text of one token; U+FFFD stands for bytes that are no whole character."""
        said: str = self.tokenizer.decode([token], skip_special_tokens=False)
        return said

    def render(self, messages: list[dict[str, str]]) -> str:
        """The messages in the bundle's chat template, ready for the assistant's turn.

        Raises:
            UsageError: there is no chat template, or it refuses the messages.
        """
        if self._template is None:
            raise UsageError(
                "this bundle has no chat template", "leave --chat out, and write the prompt as the model expects it"
            )
        given = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return _chat_environment().from_string(self._template).render({**self._special_tokens, **given})
        except Exception as error:  # a template is a program, and may fail in any way
            reason = " ".join(str(error).split())
            raise UsageError(f"the chat template refuses the messages: {reason}", "leave --chat out") from error


def _chat_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """What transformers gives a chat template to run in, which checkpoints' templates rely on."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part, for training; here its contents stand as they are."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own form

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class TextStream:
    """Confirmed tokens in, text out: whole characters only, and nothing that may yet turn out to be a stop string."""

    def __init__(self, tokenizer: Any, prompt: list[int], stop: tuple[str, ...]):
        self._tokenizer = tokenizer
        self._decoder: Any = DecodeStream(skip_special_tokens=True)
        self._undecoded: list[int] = []
        for token in prompt[-PRIMED:]:  # what follows may depend on what came before: a space, the rest of a character
            self._step(token)
        self._echo: str = tokenizer.decode(self._undecoded)  # of the prompt, and still to come out of the decoder
        self._stop = stop
        self._held: list[Piece] = []
        self._from_draft = False
        self.stopped = False

    def push(self, token: int, from_draft: bool, may_stop: bool = True) -> list[Piece]:
        """The text that this token sets free; `stopped` is set where it completes a stop string, if it may."""
        self._from_draft = from_draft
        text = self._step(token)
        if text is None:
            return []
        text, self._echo = text.removeprefix(self._echo), ""
        if not self._stop:
            return [(text, from_draft)] if text else []
        self._held.append((text, from_draft))
        held = "".join(piece for piece, _ in self._held)
        if not may_stop:
            return self._release(len(held))
        found = [at for at in (held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            return self._release(min(found))
        kept = max((_overlap(held, stop) for stop in self._stop), default=0)
        return self._release(len(held) - kept)

    def finish(self) -> list[Piece]:
        """What is still held back when the text ends by itself. A character cut in half comes as U+FFFD."""
        pieces = [] if self.stopped else self._release(sum(len(piece) for piece, _ in self._held))
        if self._undecoded and not self.stopped:
            rest = self._tokenizer.decode(self._undecoded, skip_special_tokens=True).removeprefix(self._echo)
            pieces += [(rest, self._from_draft)] if rest else []
        return pieces

    def _step(self, token: int) -> str | None:
        """The text that is whole with this token, if any is."""
        self._undecoded.append(token)
        try:
            text: str | None = self._decoder.step(self._tokenizer, token)
        except Exception:  # tokenizers' own, where bytes that were no character turn out to be others than it had shown
            text = self._tokenizer.decode(self._undecoded, skip_special_tokens=True)
            self._decoder = DecodeStream(skip_special_tokens=True)
        if text is not None:
            self._undecoded.clear()
        return text

    def _release(self, length: int) -> list[Piece]:
        """The first `length` characters of what is held, piece by piece; the rest stays."""
        out: list[Piece] = []
        while self._held and length > 0:
            text, from_draft = self._held.pop(0)
            if len(text) > length:
                self._held.insert(0, (text[length:], from_draft))
                text = text[:length]
            length -= len(text)
            out.append((text, from_draft))
        return out


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
