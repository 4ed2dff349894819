"""Drafts from the text itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.runtime.drafters.base import Proposal
from outrider.runtime.drafters.ngram import LONGEST, SHORTEST, NgramIndex


def written_out(tokens: list[int], most: int) -> Proposal | None:
    """The same, looking through the whole text."""
    for length in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[-length:]:
                found = list(tokens)
                for at in range(most):
                    found.append(found[start + length + at])
                return Proposal(found[len(tokens) :], length)
    return None


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 8))
def test_it_proposes_what_followed_the_latest_longest_agreement(tokens: list[int], most: int) -> None:
    index = NgramIndex()
    index.extend(tokens)
    assert index.propose(most) == written_out(tokens, most)


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), max_size=30), st.integers(0, 30))
def test_what_was_rewound_is_forgotten(tokens: list[int], others: list[int], length: int) -> None:
    index, fresh = NgramIndex(), NgramIndex()
    index.extend(tokens)
    index.truncate(length)
    index.extend(others)
    fresh.extend(tokens[:length] + others)
    assert index.propose(5) == fresh.propose(5)
    assert len(index) == len(fresh)


def test_a_text_that_repeats_itself_is_expected_to_repeat_again() -> None:
    index = NgramIndex()
    index.extend([7, 1, 2, 1, 2])
    assert index.propose(5) == Proposal([1, 2, 1, 2, 1], 2)
