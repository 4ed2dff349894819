"""Text in and out: the prompt's tokens, and confirmed tokens as text that is never taken back."""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from outrider.bundle.manifest import CHAT_TEMPLATE, TOKENIZER, Manifest
from outrider.errors import FolderError, UsageError
from outrider.runtime.text import prompt_length
from outrider.runtime.text.chat_template import NOTHING, ChatTemplate, Messages, Tools
from outrider.runtime.text.special_tokens import Aliases, control_tokens
from outrider.runtime.text.token_bytes import decode, line, panicked, token_bytes

PROMPT_CONTEXT = 64  # of the prompt's last tokens: the answer may end a character that they begin
PLAIN = "\ue004"  # a character for private use, which is part of no token
TOKEN_MARK = "\ufdd0"  # no character: stands before the text of a token, which other tokens may spell as well

Piece = tuple[str, bool]
"""Text, and whether the token that completed it came from the draft."""


Chat = tuple[Messages, Tools]
Render = Callable[[Messages, Tools], str]


class PromptTooLongError(UsageError):
    """A prompt has more tokens than it may have."""


class Text:
    """A bundle's tokenizer and chat template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None):
        """Take both; the tokenizer is set to encode whole texts."""
        self.tokenizer: Any = tokenizer
        self.template = template
        tokenizer.no_truncation()  # some checkpoints' files silently truncate every text
        tokenizer.no_padding()

    @classmethod
    def load(cls, folder: Path, manifest: Manifest) -> Text:
        """Load both from a bundle's folder.

        Raises:
            FolderError: one of them cannot be read.
        """
        path = folder / TOKENIZER
        try:
            tokenizer = Tokenizer.from_file(str(path))
            if CHAT_TEMPLATE not in manifest.files:
                return cls(tokenizer, None)
            path = folder / CHAT_TEMPLATE
            return cls(tokenizer, ChatTemplate(path.read_text(encoding="utf-8"), manifest.generation.special_tokens))
        except BaseException as error:  # tokenizers raises bare Exceptions
            if not isinstance(error, Exception) and not panicked(error):
                raise
            raise FolderError(f"{path} cannot be read: {error}", "rebuild the bundle") from error

    def encode(
        self,
        prompt: str,
        *,
        chat: bool,
        limit: int | None = None,
        allow_special_tokens: bool = False,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Return the token ids of a prompt, as it is or as a user's message in the chat template.

        Args:
            limit: tokens. A prompt that has more for certain is refused without being tokenized; others may have more.
            allow_special_tokens: see `encode_chat`. A prompt as it is may always contain special tokens.
            add_special_tokens: whether a prompt as it is gets those that the tokenizer puts around a text.

        Raises:
            UsageError: the prompt is empty or is not text, or the bundle has no chat template.
            PromptTooLongError: it has more than `limit` tokens.
        """
        if not prompt:
            raise UsageError("the prompt is empty", "pass some text", param="prompt")
        if chat:
            messages = [{"role": "user", "content": prompt}]
            return self.encode_chat(messages, limit=limit, allow_special_tokens=allow_special_tokens)
        self._check(prompt, limit)
        return _encode(self.tokenizer, prompt, add_special_tokens)

    def encode_chat(
        self,
        messages: Messages,
        tools: Tools = (),
        *,
        limit: int | None = None,
        allow_special_tokens: bool = False,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] = NOTHING,
    ) -> list[int]:
        """Return the token ids of messages in the chat template.

        Args:
            tools: the definitions of tools that the model may call.
            limit: see `encode`.
            add_generation_prompt: whether the assistant's turn begins behind them.
            template_kwargs: variables of the template's own, such as `enable_thinking`.
            allow_special_tokens: whether text of a message or a tool can be a special token, or another that the template
                writes, and so for instance begin a turn. By default it is encoded as the characters that it consists of.

        Raises:
            UsageError: there is no chat template, it rejects the messages or changes special tokens in them, or they are
                not text.
            PromptTooLongError: they have more than `limit` tokens.
        """
        render = functools.partial(self.render, add_generation_prompt=add_generation_prompt, further=template_kwargs)
        rendered = render(messages, tools)
        self._check(rendered, limit)
        if allow_special_tokens or not self._control_tokens:
            return _encode(self.tokenizer, rendered, add_special_tokens=False)
        if any(token in text for text in _texts(template_kwargs) for token in self._control_tokens):
            raise UsageError("a variable of the template contains special tokens", "remove them", param="template_kwargs")
        chat = messages, tools
        if not self._has_control_tokens(chat):
            if self._writes_more(rendered, chat, render):
                raise _changed()
            return _encode(self.tokenizer, rendered, add_special_tokens=False)
        aliases = self._aliases
        with_placeholders = _render_changed(render, chat, aliases.hide)
        # Where the template changes them, nobody can tell which tokens are its own.
        if aliases.show(with_placeholders) != rendered or self._writes_more(with_placeholders, chat, render):
            raise _changed()
        return _encode(aliases.tokenizer, aliases.protect(with_placeholders), add_special_tokens=False)

    def _writes_more(self, rendered: str, chat: Chat, render: Render) -> bool:
        """Return whether the template has made control tokens of a chat's texts that do not contain any: in lower case, say,
        or by joining parts of them. In plain texts of the same words there is nothing that could become one."""
        plain = _render_changed(render, chat, lambda text: re.sub(r"[^\w\s]", PLAIN, text))
        return any(rendered.count(token) > plain.count(token) for token in self._control_tokens)

    def _check(self, prompt: str, limit: int | None) -> None:
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError("the prompt is not UTF-8 text", "convert it to UTF-8", param="prompt") from error
        if limit is None or len(prompt) <= limit or self._bound is None:
            return
        if (count := self._bound.tokens(prompt)) > limit:
            raise PromptTooLongError(
                f"the prompt has at least {count:,} tokens; the limit is {limit:,}",
                "shorten it, or build the bundle with a larger capacity",
                param="prompt",
            )

    @functools.cached_property
    def _bound(self) -> prompt_length.Bound | None:
        return prompt_length.bound(self.tokenizer)

    @functools.cached_property
    def _control_tokens(self) -> list[str]:
        written = "" if self.template is None else self.template.samples()
        return control_tokens(self.tokenizer.get_added_tokens_decoder().values(), written)

    def _has_control_tokens(self, chat: Chat) -> bool:
        """Return whether a text of a chat contains that of a control token, before or after normalization."""
        texts = list(_texts(chat))
        if self._normalizes_tokens:
            texts += [self.tokenizer.normalizer.normalize_str(text) for text in texts]
        return any(token in text for text in texts for token in self._control_tokens)

    @functools.cached_property
    def _normalizes_tokens(self) -> bool:
        """Whether added tokens are looked for in normalized text; most tokenizers look for them in the text as it is."""
        added = self.tokenizer.get_added_tokens_decoder().values()
        return self.tokenizer.normalizer is not None and any(token.normalized for token in added)

    @functools.cached_property
    def _aliases(self) -> Aliases:
        try:
            return Aliases(self.tokenizer, self._control_tokens)
        except ValueError as error:
            raise UsageError(
                f"the messages contain special tokens, and {error}", "remove them from the text", param="chat"
            ) from error

    def token(self, token: int) -> str:
        """Return the text of one token behind others; U+FFFD stands for bytes that are not a whole character."""
        return self.token_bytes(token).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token behind others.

        Raises:
            EngineError: the tokenizer fails.
        """
        return token_bytes(self.tokenizer).of(token)

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, special ones included.

        Raises:
            EngineError: the tokenizer fails.
        """
        return decode(self.tokenizer, tokens)

    def render(
        self,
        messages: Messages,
        tools: Tools = (),
        *,
        add_generation_prompt: bool = True,
        further: Mapping[str, Any] = NOTHING,
    ) -> str:
        """Return the messages in the bundle's chat template; see `ChatTemplate.render`.

        Raises:
            UsageError: there is no chat template, or it rejects the messages.
        """
        if self.template is None:
            raise UsageError(
                "this bundle has no chat template", "write the prompt as the model expects it, without a template", param="chat"
            )
        return self.template.render(messages, tools, add_generation_prompt=add_generation_prompt, further=further)


def _texts(value: object) -> Iterator[str]:
    """Yield the texts in a value of JSON, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from value
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def _render_changed(render: Render, chat: Chat, change: Callable[[str], str]) -> str:
    """Return a chat in the template after a change to its texts; nothing if the template rejects it."""

    def changed(value: Any) -> Any:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, Mapping):
            return {change(key): changed(each) for key, each in value.items()}
        return [*map(changed, value)] if isinstance(value, list | tuple) else value

    try:
        return render(*map(changed, chat))
    except UsageError:
        return ""


def _changed() -> UsageError:
    return UsageError(
        "the messages contain special tokens, which the chat template changes", "remove them from the text", param="chat"
    )


def _encode(tokenizer: Any, prompt: str, add_special_tokens: bool) -> list[int]:
    """Return the token ids of a prompt. Only `encode_batch` and its variants let other threads run meanwhile."""
    try:
        (encoded,) = tokenizer.encode_batch_fast([prompt], add_special_tokens=add_special_tokens)
    except BaseException as error:
        if not panicked(error):
            raise
        raise UsageError(f"the tokenizer fails on the prompt: {line(error)}", "shorten or change it", param="prompt") from error
    tokens: list[int] = encoded.ids
    if not tokens:
        raise UsageError("the prompt has no tokens", "use a longer prompt", param="prompt")
    return tokens


class TextStream:
    """Turns confirmed tokens into text: whole characters only, and nothing that may still become a stop string."""

    def __init__(self, tokenizer: Any, prompt: list[int], stop: tuple[str, ...], shown: Mapping[int, str] | None = None):
        """Begin after `prompt`; `stop` are the stop strings, and `shown` the tokens that are text with a `TOKEN_MARK` before
        it, which no other text has."""
        self._bytes, self._shown = token_bytes(tokenizer), shown or {}
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun, self._echo = False, ""
        for token in prompt[-PROMPT_CONTEXT:]:  # the answer's first text may depend on it: a space, the rest of a character
            self._step(token)
        self._echo = "\ufffd" if self._characters.getstate()[0] else ""  # half a character, if the answer does not end it
        self.stop = stop
        self._overlaps = [0] * len(stop)  # for each, how many of its first characters the text ends with
        self._held: list[Piece] = []
        self._from_draft = False
        self.stopped = False

    def extend(self, tokens: list[int], accepted: int) -> list[Piece]:
        """Return the text that can be shown after a round's tokens, the first `accepted` of which were drafted, if there are no
        stop strings."""
        pieces: list[Piece] = []
        for index, token in enumerate(tokens):
            if text := self._step(token):
                pieces.append((text, index < accepted))
        self._from_draft = len(tokens) <= accepted
        return pieces

    def push(self, token: int, from_draft: bool, may_stop: bool = True) -> list[Piece]:
        """Return the text that can be shown after this token.

        With `may_stop`, a completed stop string sets `stopped`, and the text ends before it.
        """
        self._from_draft = from_draft
        text = self._step(token)
        return self._add(text, may_stop) if text else []

    def finish(self) -> list[Piece]:
        """Return the text still held back when generation ends, up to a stop string; half a character comes as U+FFFD."""
        if self.stopped:
            return []
        pieces = self._add(self._rest(), may_stop=True)
        return pieces if self.stopped else pieces + self._release(sum(len(text) for text, _ in self._held))

    def _add(self, text: str, may_stop: bool) -> list[Piece]:
        """Return the text that can be shown after some more."""
        self._held.append((text, self._from_draft))
        held = "".join(piece for piece, _ in self._held)
        if not may_stop:
            return self._release(len(held))
        matches = [start for start in (held.find(stop) for stop in self.stop) if start >= 0]
        if matches:
            self.stopped = True
            return self._release(min(matches))
        known = zip(self.stop, self._overlaps, strict=True)
        self._overlaps = [_overlap(held, stop, before + len(text)) for stop, before in known]
        return self._release(len(held) - max(self._overlaps, default=0))

    def _step(self, token: int) -> str:
        """Return the text that this token completes."""
        if token in self._shown:
            return self._rest() + TOKEN_MARK + self._shown[token]
        if token in self._bytes.special:
            return ""
        text = self._decode(self._bytes.of(token, begins=not self._begun))
        self._begun = True
        return self._unmarked(text)

    def _rest(self) -> str:
        """Return U+FFFD for half a character that will not be completed."""
        return self._decode(b"", final=True)

    def _decode(self, added: bytes, final: bool = False) -> str:
        if text := self._characters.decode(added, final):
            text, self._echo = text.removeprefix(self._echo), ""
        return text

    def _unmarked(self, text: str) -> str:
        return text.replace(TOKEN_MARK, "\ufffd") if self._shown else text

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


def _overlap(text: str, stop: str, limit: int) -> int:
    """Return the length of the longest suffix of `text`, of at most `limit` characters, that is a proper prefix of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1, limit), 0, -1) if text.endswith(stop[:size])), 0)
