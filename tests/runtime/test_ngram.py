"""Drafts from the text itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.runtime.ngram import LONGEST, SHORTEST, NgramDrafter


def written_out(tokens: list[int], most: int) -> tuple[list[int], int]:
    """The same, looking through the whole text."""
    for length in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[-length:]:
                found = list(tokens)
                for at in range(most):
                    found.append(found[start + length + at])
                return found[len(tokens) :], length
    return [], 0


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 8))
def test_it_proposes_what_followed_the_latest_longest_agreement(tokens: list[int], most: int) -> None:
    drafter = NgramDrafter()
    drafter.extend(tokens)
    assert drafter.propose(most) == written_out(tokens, most)


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), max_size=30), st.integers(0, 30))
def test_what_was_rewound_is_forgotten(tokens: list[int], others: list[int], length: int) -> None:
    drafter, fresh = NgramDrafter(), NgramDrafter()
    drafter.extend(tokens)
    drafter.rewind(length)
    drafter.extend(others)
    fresh.extend(tokens[:length] + others)
    assert drafter.propose(5) == fresh.propose(5)
    assert drafter.length == fresh.length


def test_a_text_that_repeats_itself_goes_on_so() -> None:
    drafter = NgramDrafter()
    drafter.extend([7, 1, 2, 1, 2])
    assert drafter.propose(5) == ([1, 2, 1, 2, 1], 2)
