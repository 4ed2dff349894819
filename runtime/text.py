"""Text in and out: the prompt's tokens, and confirmed tokens as text that is never taken back."""

from __future__ import annotations

import functools
import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from outrider.bundle.manifest import CHAT_TEMPLATE, TOKENIZER, Manifest
from outrider.errors import FolderError, UsageError

# How many of the prompt's last tokens the decoder sees. No character is longer, and the cost of decoding an incomplete run of
# bytes grows with the square of its length.
PROMPT_CONTEXT = 64

Piece = tuple[str, bool]
"""Text, and whether the token that completed it came from the draft."""


class Text:
    """A bundle's tokenizer and chat template."""

    def __init__(self, folder: Path, manifest: Manifest):
        """Load both from a bundle's folder.

        Raises:
            FolderError: the tokenizer cannot be read.
        """
        try:
            self.tokenizer: Any = Tokenizer.from_file(str(folder / TOKENIZER))
            self.tokenizer.no_truncation()  # some checkpoints' files silently truncate every text
            self.tokenizer.no_padding()
        except Exception as error:  # tokenizers raises bare Exceptions
            raise FolderError(f"{folder / TOKENIZER} cannot be read: {error}", "rebuild the bundle") from error
        self._special_tokens = manifest.generation.special_tokens
        template = folder / CHAT_TEMPLATE
        self._template_source = template.read_text(encoding="utf-8") if CHAT_TEMPLATE in manifest.files else None

    def encode(self, prompt: str, *, chat: bool) -> list[int]:
        """Return the token ids of a prompt, as it is or as a user's message in the chat template.

        Raises:
            UsageError: the prompt is empty or is not text, or the bundle has no chat template.
        """
        if not prompt:
            raise UsageError("the prompt is empty", "pass some text", param="prompt")
        if chat:
            return self.encode_chat([{"role": "user", "content": prompt}])
        return self._encode(prompt, add_special_tokens=True)

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the token ids of messages in the chat template.

        Raises:
            UsageError: there is no chat template, it rejects the messages, or they are not text.
        """
        return self._encode(self.render(messages), add_special_tokens=False)

    def _encode(self, prompt: str, add_special_tokens: bool) -> list[int]:
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError("the prompt is not UTF-8 text", "convert it to UTF-8", param="prompt") from error
        tokens: list[int] = self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens).ids
        if not tokens:
            raise UsageError("the prompt has no tokens", "use a longer prompt", param="prompt")
        return tokens

    def token(self, token: int) -> str:
        """Return the text of one token; U+FFFD stands for bytes that are not a whole character."""
        text: str = self.tokenizer.decode([token], skip_special_tokens=False)
        return text

    def render(self, messages: list[dict[str, str]]) -> str:
        """Return the messages in the bundle's chat template, ready for the assistant's turn.

        Raises:
            UsageError: there is no chat template, or it rejects the messages.
        """
        if self._template_source is None:
            raise UsageError(
                "this bundle has no chat template", "write the prompt as the model expects it, without a template", param="chat"
            )
        variables = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return self._template.render({**self._special_tokens, **variables})
        except Exception as error:  # a template is a program and may fail in any way
            reason = " ".join(str(error).split())
            raise UsageError(
                f"the chat template rejects the messages: {reason}",
                "change them, or write the prompt without a template",
                param="chat",
            ) from error

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        """The compiled chat template, made when it is first needed: compiling takes longer than most renderings."""
        assert self._template_source is not None
        return _chat_environment().from_string(self._template_source)


def _chat_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Return a sandbox with what transformers offers to chat templates, since those of checkpoints rely on it."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _Generation(jinja2.ext.Extension):
    """Ignore `{% generation %}`, which marks the assistant's part for training, and keep its contents."""

    tags = {"generation"}  # noqa: RUF012  # the form that jinja2 asks for

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class TextStream:
    """Turns confirmed tokens into text: whole characters only, and nothing that may still become a stop string."""

    def __init__(self, tokenizer: Any, prompt: list[int], stop: tuple[str, ...]):
        """Begin after `prompt`; `stop` are the stop strings."""
        self._tokenizer = tokenizer
        self._decoder: Any = DecodeStream(skip_special_tokens=True)
        self._undecoded: list[int] = []
        for token in prompt[-PROMPT_CONTEXT:]:  # the answer's first text may depend on it: a space, the rest of a character
            self._step(token)
        self._echo: str = tokenizer.decode(self._undecoded)  # the part of the prompt that the decoder has yet to return
        self.stop = stop
        self._held: list[Piece] = []
        self._from_draft = False
        self.stopped = False

    def extend(self, tokens: list[int], accepted: int) -> list[Piece]:
        """Return the text that can be shown after a round's tokens, the first `accepted` of which were drafted, if there are no
        stop strings."""
        pieces: list[Piece] = []
        for index, token in enumerate(tokens):
            text = self._step(token)
            if text is not None:
                if self._echo:
                    text, self._echo = text.removeprefix(self._echo), ""
                if text:
                    pieces.append((text, index < accepted))
        self._from_draft = len(tokens) <= accepted
        return pieces

    def push(self, token: int, from_draft: bool, may_stop: bool = True) -> list[Piece]:
        """Return the text that can be shown after this token.

        With `may_stop`, a completed stop string sets `stopped`, and the text ends before it.
        """
        self._from_draft = from_draft
        text = self._step(token)
        if text is None:
            return []
        text, self._echo = text.removeprefix(self._echo), ""
        self._held.append((text, from_draft))
        held = "".join(piece for piece, _ in self._held)
        if not may_stop:
            return self._release(len(held))
        matches = [start for start in (held.find(stop) for stop in self.stop) if start >= 0]
        if matches:
            self.stopped = True
            return self._release(min(matches))
        withheld = max((_overlap(held, stop) for stop in self.stop), default=0)
        return self._release(len(held) - withheld)

    def finish(self) -> list[Piece]:
        """Return the text still held back when generation ends without a stop string; half a character comes as U+FFFD."""
        pieces = [] if self.stopped else self._release(sum(len(piece) for piece, _ in self._held))
        if self._undecoded and not self.stopped:
            rest = self._tokenizer.decode(self._undecoded, skip_special_tokens=True).removeprefix(self._echo)
            pieces += [(rest, self._from_draft)] if rest else []
        return pieces

    def _step(self, token: int) -> str | None:
        """Return the text that this token completes, or None."""
        self._undecoded.append(token)
        try:
            text: str | None = self._decoder.step(self._tokenizer, token)
        except Exception:  # the decoder raises this when later bytes change text that it has already returned
            text = self._tokenizer.decode(self._undecoded, skip_special_tokens=True)
            self._decoder = DecodeStream(skip_special_tokens=True)
        if text is not None:
            self._undecoded.clear()
        return text

    def _release(self, length: int) -> list[Piece]:
        """Remove the first `length` characters of the held text and return them as pieces."""
        released: list[Piece] = []
        while self._held and length > 0:
            text, from_draft = self._held.pop(0)
            if len(text) > length:
                self._held.insert(0, (text[length:], from_draft))
                text = text[:length]
            length -= len(text)
            released.append((text, from_draft))
        return released


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
