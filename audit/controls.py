"""Samplers that the audit puts into the loop: the bundle's own under watch, and the reference, right or wrong."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from outrider.audit.reference import TOLERANCE, Edit, Fault, draw, edit, excluded, named_settings, verify, warp
from outrider.engines.session import Floats, Sampler
from outrider.runtime.sampler import ACCEPTING, DRAFTING, DRAWING, Logprobs, Request, TokenSampler

CHECKED = 4  # every so many runs of a graph are decided again by the reference
CLOSE = 1e-4  # what fp32 may change of a probability


class WatchedSampler(TokenSampler):
    """The bundle's samplers. Counts emitted tokens, those that truncation excludes, and where the reference disagrees."""

    def __init__(self, samplers: dict[str, Sampler], vocab_rows: int, max_rows: int):
        super().__init__(samplers, vocab_rows, max_rows)
        self.emitted = 0
        self.excluded = 0
        self.checked = 0
        self.disagreed = 0
        self.rounds: list[tuple[int, list[int]]] = []  # of each verifying pass: tokens drafted, tokens emitted
        self._runs = 0

    def draft(self, request: Request, logits: Floats, row: int) -> int:
        token = super().draft(request, logits, row)
        if self._check_this():
            self.disagreed += not any(self._drawn_so(token, request, logits, row, each) for each in readings(request))
        return token

    def _drawn_so(self, token: int, request: Request, logits: Floats, row: int, settings: dict[str, float]) -> bool:
        """Whether the reference would draw that token, and from the same q."""
        laid_out = np.full(self.q.shape[2], -np.inf)
        width = min(logits.shape[2], len(laid_out))
        laid_out[:width] = logits[0, 0, :width]
        p = warp(edit(laid_out, settings, edits_of(request), self.drafted[0, :row].tolist(), row), settings)
        place = request.uniforms(request.emitted + row, 1)[0]
        same_q = settings["temperature"] == 0 or np.abs(self.q[row, 0] - p).max() < CLOSE
        return bool(same_q) and token == draw(p, place[DRAWING if request.exact else DRAFTING])

    def verify(self, request: Request, logits: Floats, drafted_count: int) -> list[int]:
        tokens = self.decide(request, logits, drafted_count)
        settings, edits = named_settings(request.settings[0]), edits_of(request)
        self.emitted += len(tokens)
        self.rounds.append((drafted_count, tokens))
        for row, token in enumerate(tokens):
            x = edit(logits[0, row].astype(np.float64), settings, edits, tokens[:row], row)
            self.excluded += excluded(x, settings, token)
        return tokens

    def decide(self, request: Request, logits: Floats, drafted_count: int) -> list[int]:
        """The verdict itself."""
        tokens = super().verify(request, logits, drafted_count)
        if self._check_this():
            verdicts = (self.reference(request, logits, drafted_count, settings) for settings in readings(request))
            self.disagreed += not any(tokens == verdict for verdict in verdicts)
        return tokens

    def reference(
        self,
        request: Request,
        logits: Floats,
        drafted_count: int,
        settings: dict[str, float],
        fault: Fault | None = None,
    ) -> list[int]:
        """The verdict of the reference."""
        return verify(
            logits[0].astype(np.float64),
            self.drafted[0, :drafted_count].tolist(),
            self.q[:drafted_count, 0].astype(np.float64),
            settings,
            request.uniforms(request.emitted, drafted_count + 1)[:, ACCEPTING.start : DRAWING.stop],
            edits_of(request),
            fault,
        )

    def logprobs(self, request: Request, logits: Floats, tokens: list[int]) -> list[Logprobs]:
        found = super().logprobs(request, logits, tokens)
        if self._check_this():
            x = logits[0, : len(tokens)].astype(np.float64)
            normal = x - x.max(axis=1, keepdims=True)
            normal -= np.log(np.exp(normal).sum(axis=1, keepdims=True))
            claimed = [(row, *pair) for row, each in enumerate(found) for pair in ((tokens[row], each.logprob), *each.top)]
            self.disagreed += any(abs(normal[row, token] - value) > 10 * CLOSE for row, token, value in claimed)
        return found

    def _check_this(self) -> bool:
        self._runs += 1
        due = self._runs % CHECKED == 0
        self.checked += due
        return due


class ReferenceSampler(WatchedSampler):
    """Drafts by the bundle's graph and verifies by the reference, with a fault or, to prove the reference, without."""

    fault: Fault | None = None

    def decide(self, request: Request, logits: Floats, drafted_count: int) -> list[int]:
        return self.reference(request, logits, drafted_count, named_settings(request.settings[0]), self.fault)


def readings(request: Request) -> Iterator[dict[str, float]]:
    """A request's settings; and, where top_p falls on the edge of a token, as fp32 may read them."""
    settings = named_settings(request.settings[0])
    yield settings
    if settings["top_p"] < 1:
        for factor in (1 - TOLERANCE, 1 + TOLERANCE):
            yield settings | {"top_p": min(1.0, settings["top_p"] * factor)}


def edits_of(request: Request) -> dict[int, Edit]:
    """A request's table of edits, as the reference wants it."""
    ids, rows = request.table()
    return {
        token: Edit(bias, int(count), seen > 0, int(banned_rows))
        for token, (bias, count, seen, banned_rows) in zip(ids[0].tolist(), rows[0].tolist(), strict=True)
    }
