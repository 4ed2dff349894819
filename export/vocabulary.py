"""Draft and target must mean the same by every token id."""

from __future__ import annotations

from outrider.errors import VocabularyMismatchError


def check_same_vocabulary(target: dict[int, str], draft: dict[int, str]) -> int:
    """Compare two vocabularies (token by id), id by id, and return how many tokens they have.

    Padding rows of the models' heads are no tokens, so different padded sizes pass.

    Raises:
        VocabularyMismatchError: names the first id whose tokens differ.
    """
    for index in sorted(target.keys() | draft.keys()):
        if target.get(index) != draft.get(index):
            raise VocabularyMismatchError(
                f"draft and target have different tokenizers: token {index} is {_shown(target, index)} in the target and"
                f" {_shown(draft, index)} in the draft",
                "choose a draft of the target's own family",
            )
    return len(target)


def _shown(vocabulary: dict[int, str], index: int) -> str:
    return repr(vocabulary[index]) if index in vocabulary else "absent"
