"""What a store of texts proposes."""

from __future__ import annotations

import tracemalloc
from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.runtime.memory import ngram_store
from outrider.runtime.memory.ngram_store import END, LEAST_AGREEMENT, LENGTHS, NgramStore

SIZE, SMALL = 256, 64


def written_out(ring: list[int], text: list[int], k: int) -> tuple[list[int], int]:
    """The same, looking through the whole ring, the oldest token first."""
    for length in LENGTHS:
        run = text[-length:]
        after = [at for at in range(length, len(ring)) if len(run) == length and ring[at - length : at] == run]
        after.reverse()
        if not after:
            continue
        proposed: list[int] = []
        for step in range(k if length == LENGTHS[0] else min(k, length)):
            tokens = [ring[at + step] for at in after if ring[at : at + step] == proposed]
            best = max(tokens, key=tokens.count)
            if best == END or tokens.count(best) < LEAST_AGREEMENT * len(after):
                break
            proposed.append(best)
        return proposed, length
    return [], 0


texts = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=60), max_size=20)


@given(texts, st.lists(st.integers(0, 3), max_size=12), st.integers(1, 8))
def test_it_proposes_what_most_often_followed_the_longest_match(stored: list[list[int]], text: list[int], k: int) -> None:
    store = NgramStore(SMALL)
    for each in stored:
        store.append(each)
    ring = store.contents().tolist()
    assert len(ring) == len(store) <= SMALL
    with mock.patch.object(ngram_store, "CANDIDATES", SMALL):  # otherwise n-grams with the same hash could take the places
        assert store.propose(text, k) == written_out(ring, text, k)


def test_the_commonest_continuation_wins_and_the_latest_among_equals() -> None:
    store = NgramStore(SIZE)
    for last in (5, 6, 6, 7, 8):
        store.append([1, 2, last])
    assert store.propose([1, 2], 1) == ([6], 2)
    store.append([1, 2, 8])
    assert store.propose([1, 2], 1) == ([8], 2)
    for last in range(10, 20):
        store.append([1, 2, last])
    assert store.propose([1, 2], 1) == ([], 2)  # no token has a share worth drafting


def test_only_the_latest_occurrences_count() -> None:
    store = NgramStore(SIZE)
    for last in [5] * ngram_store.CANDIDATES + [6] * (ngram_store.CANDIDATES // 2 - 1):
        store.append([1, 2, last])
    assert store.propose([1, 2], 1) == ([5], 2)
    store.append([1, 2, 6])  # now half of the latest
    assert store.propose([1, 2], 1) == ([6], 2)


def test_a_proposal_ends_with_the_text_that_it_is_from() -> None:
    store = NgramStore(SIZE)
    store.append([1, 2, 3, 4])
    store.append([5, 6, 7])
    assert store.propose([1, 2], 8) == ([3, 4], 2)
    assert store.propose([3, 4], 8) == ([], 2)


def test_a_longer_match_proposes_more() -> None:
    store = NgramStore(SIZE)
    text = list(range(40))
    store.append(text)
    assert [len(store.propose(text[4 : 4 + length], 16)[0]) for length in (1, 2, 3, 4, 7, 8, 9)] == [0, 2, 2, 4, 4, 16, 16]


def test_the_oldest_tokens_are_overwritten_and_what_is_repeated_stays() -> None:
    store, system, generator = NgramStore(SIZE), list(range(1000, 1050)), np.random.default_rng(0)
    for _ in range(40):  # four times the ring
        once = generator.integers(0, 1000, 25).tolist()
        store.append(system + once, len(system))
        assert store.propose(once[:8], 4) == (once[8:12], 8)
        assert store.propose(system[:8], 4) == (system[8:12], 8)
        last = once
    assert len(store) == SIZE
    gone = np.random.default_rng(0).integers(0, 1000, 25).tolist()
    assert store.propose(gone[:8], 4)[0] == []
    assert store.propose(last[:8], 4) == (last[8:12], 8)


def test_a_known_prefix_is_stored_once() -> None:
    store, system = NgramStore(SIZE), list(range(100))
    for last in (7, 8, 8):
        store.append([*system, last], len(system))
    assert len(store) == 100 + 2 + 2 * (LENGTHS[0] + 2)
    assert store.propose(system[-8:], 1) == ([8], 8)  # what followed counts each time


def test_a_text_longer_than_the_ring_is_cut_at_its_beginning() -> None:
    store, text = NgramStore(SIZE), list(range(1000))
    store.append(text)
    assert store.contents().tolist() == [*text[1 - SIZE :], END]
    assert store.propose(text[900:908], 4) == (text[908:912], 8)


def test_a_million_tokens_take_64_megabytes_at_most() -> None:
    tracemalloc.start()
    store = NgramStore(1_000_000)
    assert 28e6 < tracemalloc.get_traced_memory()[0] <= 64e6
    tracemalloc.stop()
    assert len(store) == 0
