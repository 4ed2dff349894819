"""Prompts and chats as tokens."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from outrider.bundle.manifest import CHAT_TEMPLATE, TOKENIZER, Manifest
from outrider.errors import FolderError, UsageError
from outrider.runtime.text import prompt_length
from outrider.runtime.text.chat_template import Chat, ChatTemplate
from outrider.runtime.text.special_tokens import Aliases, control_tokens
from outrider.runtime.text.token_bytes import decode, line, panicked, token_bytes

PLAIN = "\ue004"  # a private-use character, which is part of no token


class PromptTooLongError(UsageError):
    """A prompt has more tokens than allowed."""


class Text:
    """A bundle's tokenizer and chat template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None):
        """Take both, and turn off the tokenizer's truncation and padding."""
        self.tokenizer: Any = tokenizer
        self.template = template
        tokenizer.no_truncation()  # some checkpoints silently truncate every text
        tokenizer.no_padding()

    @classmethod
    def load(cls, folder: Path, manifest: Manifest, template: str | None = None) -> Text:
        """Load both from a bundle's folder.

        Args:
            template: the chat template to use instead of the bundle's.

        Raises:
            FolderError: one of them cannot be read.
        """
        path = folder / TOKENIZER
        try:
            tokenizer = Tokenizer.from_file(str(path))
            if template is None and CHAT_TEMPLATE in manifest.files:
                path = folder / CHAT_TEMPLATE
                template = path.read_text(encoding="utf-8")
            return cls(tokenizer, None if template is None else ChatTemplate(template, manifest.generation.special_tokens))
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
            limit: the token limit. Only prompts that exceed it by their length alone are refused, without being tokenized.
            allow_special_tokens: see `encode_chat`. Outside the chat template, a prompt may always contain special tokens.
            add_special_tokens: whether to add the tokenizer's own special tokens, outside the chat template.

        Raises:
            UsageError: the prompt is empty or is not text, or the bundle has no chat template.
            PromptTooLongError: the prompt is certain to have more than `limit` tokens.
        """
        if not prompt:
            raise UsageError("the prompt is empty", "pass some text", param="prompt")
        if chat:
            messages = [{"role": "user", "content": prompt}]
            return self.encode_chat(Chat(messages), limit=limit, allow_special_tokens=allow_special_tokens)
        self._check(prompt, limit)
        return _encode(self.tokenizer, prompt, add_special_tokens)

    def encode_chat(self, chat: Chat, *, limit: int | None = None, allow_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a chat in the chat template.

        Args:
            limit: see `encode`.
            allow_special_tokens: whether text of a message or a tool may become a special token, or another control token that
                the template writes. Such a token could begin a turn, so by default it is encoded as ordinary characters.

        Raises:
            UsageError: there is no chat template, the template rejects the messages or changes special tokens in them, or the
                messages are not text.
            PromptTooLongError: see `encode`.
        """
        rendered = self.render(chat)
        self._check(rendered, limit)
        if allow_special_tokens or not self._control_tokens:
            return _encode(self.tokenizer, rendered, add_special_tokens=False)
        if any(token in text for text in _texts(chat.variables) for token in self._control_tokens):
            raise UsageError("a template variable contains special tokens", "remove them", param="template_kwargs")
        if not self._has_control_tokens(chat):
            if self._writes_more(rendered, chat):
                raise _changed()
            return _encode(self.tokenizer, rendered, add_special_tokens=False)
        aliases = self._aliases
        with_placeholders = self._render_changed(chat, aliases.hide)
        # If the template changes the special tokens of messages, its own tokens cannot be told apart from theirs.
        if aliases.show(with_placeholders) != rendered or self._writes_more(with_placeholders, chat):
            raise _changed()
        return _encode(aliases.tokenizer, aliases.protect(with_placeholders), add_special_tokens=False)

    def _writes_more(self, rendered: str, chat: Chat) -> bool:
        """Return whether the template makes control tokens of texts that contain none, by changing case or joining parts.

        For comparison, it renders the same texts without punctuation: they cannot become control tokens.
        """
        plain = self._render_changed(chat, lambda text: re.sub(r"[^\w\s]", PLAIN, text))
        return any(rendered.count(token) > plain.count(token) for token in self._control_tokens)

    def _render_changed(self, chat: Chat, change: Callable[[str], str]) -> str:
        """Return a chat in the template after a change to all its texts; empty if the template rejects it."""

        def changed(value: Any) -> Any:
            if isinstance(value, str):
                return change(value)
            if isinstance(value, Mapping):
                return {change(key): changed(each) for key, each in value.items()}
            return [*map(changed, value)] if isinstance(value, list | tuple) else value

        try:
            return self.render(chat._replace(messages=changed(chat.messages), tools=changed(chat.tools)))
        except UsageError:
            return ""

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
        """Return whether a text of a chat contains a control token, before or after normalization."""
        texts = list(_texts((chat.messages, chat.tools)))
        if self._normalizes_tokens:
            texts += [self.tokenizer.normalizer.normalize_str(text) for text in texts]
        return any(token in text for text in texts for token in self._control_tokens)

    @functools.cached_property
    def _normalizes_tokens(self) -> bool:
        """Whether the tokenizer looks for added tokens in normalized text; most look for them in the original text."""
        added = self.tokenizer.get_added_tokens_decoder().values()
        return self.tokenizer.normalizer is not None and any(token.normalized for token in added)

    @functools.cached_property
    def _aliases(self) -> Aliases:
        try:
            return Aliases(self.tokenizer, self._control_tokens)
        except ValueError as error:
            message = f"the messages contain special tokens, and {error}"
            raise UsageError(message, "remove them from the text", param="chat") from error

    def token(self, token: int) -> str:
        """Return the text of a token after others, with U+FFFD for incomplete characters."""
        return self.token_bytes(token).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token after others; see `TokenBytes.of`."""
        return token_bytes(self.tokenizer).of(token)

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens; see `token_bytes.decode`."""
        return decode(self.tokenizer, tokens)

    def render(self, chat: Chat) -> str:
        """Return a chat in the bundle's chat template; see `ChatTemplate.render`.

        Raises:
            UsageError: there is no chat template, or it rejects the messages.
        """
        if self.template is None:
            hint = "write the prompt as the model expects it, without a template, or run the bundle with --chat-template"
            raise UsageError("this bundle has no chat template", hint, param="chat")
        return self.template.render(chat)


def _texts(value: object) -> Iterator[str]:
    """Yield the texts in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from value
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def _changed() -> UsageError:
    return UsageError(
        "the messages contain special tokens, which the chat template changes", "remove them from the text", param="chat"
    )


def _encode(tokenizer: Any, prompt: str, add_special_tokens: bool) -> list[int]:
    """Return the token ids of a prompt. Of the tokenizer's methods, only `encode_batch` and its variants release the GIL."""
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
