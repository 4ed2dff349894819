"""Texts in a ring of tokens, with the earlier occurrences of their n-grams."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

LENGTHS = (8, 4, 2)  # tokens of the indexed n-grams; the longest match wins
CANDIDATES = 32  # occurrences of a match that are followed, the latest first
LEAST_AGREEMENT = 0.3  # of the followed occurrences that a proposed continuation must have
END = -1  # after each text in the ring
REPEATED = 16  # tokens of a prefix that need not be stored again
MULTIPLIER = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio (Knuth, TAOCP 6.4)
WORD = 2**64 - 1


class NgramStore:
    """Stores the latest `capacity` tokens of texts, and proposes what most often followed the last tokens of another text.

    A token takes 4 bytes and 8 for each indexed length; the tables of hashes take 12 to 24 bytes for each of the capacity.
    n-grams with equal hashes are chained, each to the one before it, as in zlib's deflate. Positions count all tokens that were
    ever stored, so an entry that the ring has overwritten is known by its age.
    """

    def __init__(self, capacity: int):
        bits = max(capacity - 1, 1).bit_length() - 1
        self._shift = 64 - bits
        self._size, self._end = capacity, 0  # the end is the position after the last token
        self._tokens = np.zeros(capacity, np.int32)
        # Positions after n-grams, by hash and by position; 0 is none. Zeros take no memory until they are overwritten.
        self._last = {length: np.zeros(1 << bits, np.int64) for length in LENGTHS}
        self._earlier = {length: np.zeros(capacity, np.int64) for length in LENGTHS}
        # Reading one number of an array takes a third of the time through a memoryview.
        self._token_view = self._tokens.data
        self._views = {length: (self._last[length].data, self._earlier[length].data) for length in LENGTHS}

    def __len__(self) -> int:
        return min(self._end, self._size)

    def contents(self) -> npt.NDArray[np.int32]:
        """Return the stored tokens in order; `END` follows each text."""
        return np.roll(self._tokens, -self._end)[self._size - len(self) :]

    def append(self, text: Sequence[int], prompt: int = 0) -> None:
        """Store a text [T], or its end if it is longer than the ring.

        A prefix of its first `prompt` tokens is left out if it is stored already and will not be overwritten soon. What follows
        counts each time.
        """
        tokens = np.array(text[1 - self._size :], np.int32)
        known = self._stored(tokens[: max(prompt - (len(text) - len(tokens)), 0)])
        tokens = np.append(tokens[known:], np.int32(END))
        start, self._end = self._end, self._end + len(tokens)
        self._tokens[np.arange(start, self._end) % self._size] = tokens
        for length in LENGTHS:
            self._index(length, tokens[:-1], start)

    def _stored(self, tokens: npt.NDArray[np.int32]) -> int:
        """Return how many tokens of a prompt to leave out. The last ones that are known are stored with what follows."""
        prefix = tokens[: LENGTHS[0]].tolist()
        most = 0
        for at in self._occurrences(prefix, LENGTHS[0]):
            if at > self._end - self._size // 2:
                stored = self._tokens[np.arange(at, min(at + len(tokens), self._end)) % self._size]
                after = tokens[len(prefix) : len(prefix) + len(stored)]
                differing = np.flatnonzero(stored[: len(after)] != after)
                most = max(most, len(prefix) + int(differing[0] if len(differing) else len(after)))
        return most - LENGTHS[0] if most >= REPEATED else 0

    def _index(self, length: int, tokens: npt.NDArray[np.int32], start: int) -> None:
        """Chain the n-grams of a text that begins at a position."""
        if len(tokens) < length:
            return
        hashes = np.zeros(len(tokens) - length + 1, np.uint64)
        for at in range(length):
            hashes = hashes * np.uint64(MULTIPLIER) + tokens[at : at + len(hashes)].astype(np.uint64)
        hashes = (hashes * np.uint64(MULTIPLIER)) >> np.uint64(self._shift)
        order = np.argsort(hashes, kind="stable")
        hashes, positions = hashes[order], order + start + length  # of the token after each n-gram
        new = np.append(True, hashes[1:] != hashes[:-1])
        earlier = np.append(0, positions[:-1])
        last = self._last[length]
        earlier[new] = last[hashes[new]]
        self._earlier[length][positions % self._size] = earlier
        last[hashes[np.append(new[1:], True)]] = positions[np.append(new[1:], True)]

    def _occurrences(self, run: list[int], length: int) -> list[int]:
        """Return the positions after the latest occurrences of the tokens `run` [length], and of others with its hash."""
        value = 0
        for token in run:
            value = value * MULTIPLIER + token & WORD
        last, earlier = self._views[length]
        oldest = self._end - self._size + length
        found: list[int] = []
        at = last[(value * MULTIPLIER & WORD) >> self._shift] if len(run) == length else -1
        while at >= max(oldest, 1) and len(found) < CANDIDATES:
            found.append(at)
            at = earlier[at % self._size]
        return found

    def propose(self, text: Sequence[int], k: int) -> tuple[list[int], int]:
        """Propose up to `k` tokens after a text, but no more than match, unless the longest n-gram does.

        Returns:
            the proposed tokens, perhaps none, and the length of the match.
        """
        for length in LENGTHS:
            run = list(text[-length:])
            most = k if length == LENGTHS[0] else min(k, length)
            followed = [rest for at in self._occurrences(run, length) if (rest := self._after(at, run, most)) is not None]
            if followed:
                return _commonest(followed), length
        return [], 0

    def _after(self, at: int, run: list[int], count: int) -> list[int] | None:
        """Return the `count` tokens from a position on, or None if other tokens than `run` precede it."""
        begin, end, view = (at - len(run)) % self._size, (at + count - 1) % self._size + 1, self._token_view
        tokens = view[begin:end].tolist() if begin < end else view[begin:].tolist() + view[:end].tolist()
        return tokens[len(run) :] if tokens[: len(run)] == run else None


def _commonest(followed: list[list[int]]) -> list[int]:
    """Return the most frequent continuation, up to where its share of all falls below `LEAST_AGREEMENT`."""
    total, proposed = len(followed), []
    for at in range(len(followed[0])):
        tokens = [rest[at] for rest in followed]
        token = tokens[0] if tokens.count(tokens[0]) == len(tokens) else max(tokens, key=tokens.count)
        followed = [rest for rest in followed if rest[at] == token]
        if token == END or len(followed) < LEAST_AGREEMENT * total:
            break
        proposed.append(token)
    return proposed
