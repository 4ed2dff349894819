"""A token id must mean the same token in draft and target."""

from __future__ import annotations

import pytest

from outrider.errors import VocabularyMismatchError
from outrider.export.checkpoints.tokenizer import TokenizerFiles
from outrider.export.checkpoints.vocabulary import check_same_vocabulary
from outrider.tests.support import END, tokenizer


def test_equal_vocabularies_pass() -> None:
    assert check_same_vocabulary({0: "a", 1: "b"}, {1: "b", 0: "a"}) == 2


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ({0: "a", 1: "c", 2: "d"}, "token 1 is 'b' in the target and 'c' in the draft"),
        ({0: "a", 1: "b"}, "token 2 is 'd' in the target and absent in the draft"),
        ({0: "a", 1: "b", 2: "d", 9: "e"}, "token 9 is absent in the target and 'e' in the draft"),
    ],
)
def test_the_first_difference_is_named(draft: dict[int, str], message: str) -> None:
    with pytest.raises(VocabularyMismatchError, match=message):
        check_same_vocabulary({0: "a", 1: "b", 2: "d"}, draft)


def test_a_vocabulary_includes_added_tokens() -> None:
    made = tokenizer()
    made.add_special_tokens(["<|user|>"])
    files = TokenizerFiles(made.to_str(), None, {}, None)
    assert files.vocabulary() == {index: token for token, index in made.get_vocab(with_added_tokens=True).items()}
    assert files.vocabulary()[0] == END
