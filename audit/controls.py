"""Samplers that the audit puts into the loop: the bundle's own under watch, and the reference, right or wrong."""

from __future__ import annotations

import numpy as np

from outrider.audit.reference import Fault, excluded, named_settings, verify
from outrider.engines.session import Floats, Sampler
from outrider.runtime.sampler import ACCEPTING, DRAWING, Request, TokenSampler


class WatchedSampler(TokenSampler):
    """The bundle's samplers. Counts emitted tokens, and those of them that truncation excludes."""

    def __init__(self, samplers: dict[str, Sampler], vocab_rows: int, max_rows: int):
        super().__init__(samplers, vocab_rows, max_rows)
        self.emitted = 0
        self.excluded = 0

    def verify(self, request: Request, logits: Floats, drafted_count: int) -> list[int]:
        tokens = self.decide(request, logits, drafted_count)
        settings = named_settings(request.settings[0])
        self.emitted += len(tokens)
        for row, token in enumerate(tokens):
            self.excluded += excluded(logits[0, row].astype(np.float64), settings, token)
        return tokens

    def decide(self, request: Request, logits: Floats, drafted_count: int) -> list[int]:
        """The verdict itself."""
        return super().verify(request, logits, drafted_count)


class ReferenceSampler(WatchedSampler):
    """Drafts by the bundle's graph and verifies by the reference, with a fault or, to prove the reference, without.

    Bias, bans and penalties are left out: the audit's requests have none.
    """

    fault: Fault | None = None

    def decide(self, request: Request, logits: Floats, drafted_count: int) -> list[int]:
        draws = request.uniforms(request.emitted, drafted_count + 1)[:, ACCEPTING.start : DRAWING.stop]
        return verify(
            logits[0].astype(np.float64),
            self.drafted[0, :drafted_count].tolist(),
            self.q[:drafted_count, 0].astype(np.float64),
            named_settings(request.settings[0]),
            draws,
            fault=self.fault,
        )
