"""The body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import Discriminator, Field, Tag

from outrider.errors import UsageError
from outrider.serve.api.protocol import MAX_PROMPTS, Common


def _kind_of_prompt(prompt: Any) -> str | None:
    """Return the tag of a prompt's type; None if the prompt or its items have any other type, or the items' types differ."""
    if not isinstance(prompt, list):
        return "str" if isinstance(prompt, str) else None
    first, *others = set(map(type, prompt)) or {str}
    return None if others else {str: "list[str]", int: "list[int]", list: "list[list[int]]"}.get(first)


TokenIds = Annotated[list[int], Field(fail_fast=True)]
PromptInput = Annotated[
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

    prompt: PromptInput
    max_tokens: int = 16
    logprobs: int | None = None
    echo: Literal[False] = False
    best_of: int | None = None

    def texts(self) -> list[str]:
        """Return the prompts, if they are text."""
        return [self.prompt] if isinstance(self.prompt, str) else [each for each in self.prompt if isinstance(each, str)]

    def token_ids(self) -> list[list[int]]:
        """Return the prompts, if they are token ids."""
        if isinstance(self.prompt, str):
            return []
        if isinstance(next(iter(self.prompt), 0), int):
            return [cast(list[int], self.prompt)]
        return [each for each in self.prompt if isinstance(each, list)]

    def check_best_of(self) -> None:
        """Check that the server does not have to rank answers.

        Raises:
            UsageError: `best_of` is neither absent nor `n`.
        """
        if self.best_of not in (None, self.n):
            raise UsageError(f"best_of is {self.best_of}; it must equal n", "leave out best_of", param="best_of")
