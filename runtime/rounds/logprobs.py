"""Logprobs of the tokens that a round emits, computed on the device in rounds that ask for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outrider.engines.device import Arena, Launch, host_buffer, in_sequence
from outrider.engines.samplers import FORBIDDEN
from outrider.runtime.rounds.buffers import RoundBuffers, Shape


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logarithms of the target's probabilities at one position, before bias, penalties and truncation. With a grammar,
    they are normalized over the allowed tokens."""

    logprob: float  # of the token itself
    top: tuple[tuple[int, float], ...]  # (token id, logprob) of the most likely tokens, best first


class LogprobsRuns:
    """The runs of the engine that computes logprobs, and their results."""

    def __init__(self, buffers: RoundBuffers):
        self._buffers = buffers
        self._arenas: dict[int, Arena] = {}  # by the number of reported tokens

    def run(self, shape: Shape) -> Launch:
        """Return the run for rounds of a shape."""
        assert shape.top is not None
        buffers, batch, rows, top = self._buffers, shape.batch, shape.rows, shape.top

        def make() -> Launch:
            most = buffers.batch * (buffers.max_k + 1)
            if top not in self._arenas:
                layout = {
                    "logprobs": ((most,), "float32"),
                    "top_ids": ((most * top,), "int64"),
                    "top_logprobs": ((most * top,), "float32"),
                }
                self._arenas[top] = Arena(buffers.device, layout)
            arena = self._arenas[top]
            tensors = {
                "logits": buffers.target_logits.part(0, batch, rows, buffers.vocab_rows),
                "tokens": buffers.outputs.device["tokens"].part(0, batch, rows),
                "candidates": host_buffer(np.array([top], dtype=np.int64)),
                "logprobs": arena.device["logprobs"].part(0, batch, rows),
                "top_ids": arena.device["top_ids"].part(0, batch, rows, top),
                "top_logprobs": arena.device["top_logprobs"].part(0, batch, rows, top),
            }
            return in_sequence([buffers.samplers["logprobs"].bind(tensors), arena.download])

        return buffers.cached(("logprobs", batch, rows, top), make)

    def of(self, shape: Shape, lane: int, count: int, top: int) -> list[Logprobs]:
        """Return the logprobs of a lane's first `count` tokens, with those of the `top` most likely ones."""
        assert shape.top is not None
        host, logprobs = self._arenas[shape.top].host, []
        for row in range(lane * shape.rows, lane * shape.rows + count):
            best = slice(row * shape.top, row * shape.top + top)
            pairs = zip(host["top_ids"][best].tolist(), host["top_logprobs"][best].tolist(), strict=True)
            allowed = tuple(pair for pair in pairs if pair[1] > FORBIDDEN)  # a grammar may allow fewer tokens
            logprobs.append(Logprobs(float(host["logprobs"][row]), allowed))
        return logprobs
