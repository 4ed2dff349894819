"""Check that draft and target have the same tokens."""

from __future__ import annotations

from outrider.errors import VocabularyMismatchError


def check_same_vocabulary(target: dict[int, str], draft: dict[int, str]) -> int:
    """Compare two vocabularies (tokens by id), and return the number of tokens.

    Output heads may be padded to different sizes, because padding rows are not tokens.

    Raises:
        VocabularyMismatchError: an id has different tokens; the message names the first such id.
    """
    for index in sorted(target.keys() | draft.keys()):
        if target.get(index) != draft.get(index):
            raise VocabularyMismatchError(
                f"draft and target have different tokenizers: token {index} is {_quoted(target, index)} in the target and"
                f" {_quoted(draft, index)} in the draft",
                "choose a draft from the same model family as the target",
            )
    return len(target)


def _quoted(vocabulary: dict[int, str], index: int) -> str:
    return repr(vocabulary[index]) if index in vocabulary else "absent"
