"""The body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import Discriminator, Field, Tag

from outrider.errors import UsageError
from outrider.serve.api.protocol import MAX_PROMPTS, Common


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
