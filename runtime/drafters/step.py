"""Drafting with a step model: what draft models, parallel drafts and draft heads have in common."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.engines.arrays import Floats, Int64s
from outrider.engines.device import Buffer, Launch, Layout, in_sequence
from outrider.engines.samplers import DRAFT_SAMPLERS
from outrider.engines.session import Pass
from outrider.runtime.drafters.cached import CachedDrafter, top_probability
from outrider.runtime.rounds.buffers import Lane, RoundBuffers, Shape, Step
from outrider.runtime.rounds.sampling import DRAFTING, DRAWING


class StepDrafter(CachedDrafter):
    """A step model, which drafts one token per step unless a subclass overrides this.

    The first step of a round writes the last few entries of the cache, its context, and drafts from the last of them.
    """

    def context_ids(self, tokens: list[int]) -> list[int]:
        return tokens

    def _after_context(self, last: int, drafted: int) -> list[int]:
        """Return the input ids of a round's first step after its context, for a text that ends with the token `last`."""
        return []

    def context_rows(self, lanes: Sequence[Lane]) -> int:
        needed = max([lane.missing for lane in lanes if lane.steps])
        return next(rows for rows in self._contexts if rows >= needed)

    def layout(self, batch: int, max_k: int) -> Layout:
        most = self._first_rows(self._contexts[-1], max_k)
        layout: dict[str, tuple[tuple[int, ...], str]] = {self._tensor("ids"): ((batch * most,), "int64")}
        for row in range(max_k):
            layout[self._tensor("position", row)] = ((batch,), "int64")
            layout[self._tensor("uniforms", row)] = ((batch, 2), "float32")
            layout[self._tensor("first_row", row)] = ((1,), "int64")
        return layout

    def _tensor(self, name: str, row: int | None = None) -> str:
        return f"{self.name} {name}" if row is None else f"{self.name} {name} {row}"

    def attach(self, buffers: RoundBuffers) -> None:
        for row in range(buffers.max_k):
            buffers.inputs.host[self._tensor("first_row", row)][0] = row
        width, device = self._session.vocab_rows, buffers.device
        self._scratch = np.empty(width, dtype=np.float32)
        sizes = [buffers.batch * most for most in self._most_logits(buffers.max_k)]
        self._logits = [device.zeros((size, width), "float32", "the logits of a round") for size in sizes]
        self._rows: dict[int, Buffer] = {}  # by drafted token: a copy of its logits, if needed
        self._take(buffers)

    def use(self, buffers: RoundBuffers) -> None:
        if buffers is not self._buffers:
            self._take(buffers)

    def _take(self, buffers: RoundBuffers) -> None:
        self._buffers, host, rows = buffers, buffers.inputs.host, range(buffers.max_k)
        self._ids, self._uniforms = host[self._tensor("ids")], [host[self._tensor("uniforms", row)] for row in rows]
        self._positions: list[Int64s] = [host[self._tensor("position", row)] for row in rows]

    def _first_rows(self, context: int, drafted: int) -> int:
        """Return the number of rows of a round's first step."""
        return context

    def _most_logits(self, max_k: int) -> list[int]:
        """Return the maximum rows of logits of each step of a round."""
        return [1 if self._session.skips_logits else self._contexts[-1], *[1] * (max_k - 1)]

    def _place(self, row: int, shape: Shape) -> tuple[int, int, int]:
        """Return the place of a token's logits: the step, the row in the step's logits, and their number of rows."""
        rows = 1 if row or self._session.skips_logits else shape.context
        return row, rows - 1, rows

    def fill(self, lanes: Sequence[Lane], shape: Shape) -> None:
        context, drafted = shape.context, shape.drafted
        rows = self._first_rows(context, drafted)
        ids = self._ids[: shape.batch * rows].reshape(shape.batch, rows)
        for index, lane in enumerate(lanes):
            sampling = lane.sampling
            if sampling is None:  # an unused slot: its pass writes where no entry is needed
                ids[index] = 0
                written = self._written[shape.first + index]
                start = min(len(written), self._session.capacity - max(rows, context + drafted - 1))
                self._keep(shape.first + index, start)
            else:
                tokens, slot = lane.tokens, shape.first + index
                self._current[slot] = lane.missing <= context
                # A batched sequence that drafts nothing may be shorter than the context.
                begin = self.shift + self._offsets[slot]
                start = max(len(tokens) - begin - context, 0)
                given = tokens[begin + start : begin + start + context]
                read = [*self.context_ids(given), *self._after_context(tokens[-1], drafted)]
                ids[index] = [*read, *[0] * (rows - len(read))]
                if not shape.greedy:
                    uniforms = sampling.uniforms(sampling.emitted, drafted)[:, DRAWING if sampling.exact else DRAFTING]
                    for step in range(drafted):
                        self._uniforms[step][index] = uniforms[step]
            for step in range(drafted):
                self._positions[step][index] = start + context + step - 1 if step else start

    def steps(self, shape: Shape) -> list[Step]:
        steps = []
        for row in range(shape.drafted):
            if self._place(row, shape)[0] == row:  # otherwise an earlier step gives the logits
                steps.append(Step(self._step(row, shape)))
            steps.append(Step(self._sampler(row, shape), self._buffers.outputs.host[f"status {row}"], row))
        return steps

    def _step(self, row: int, shape: Shape) -> Launch:
        """Return the pass that gives the logits of a drafted token."""
        rows, of_logits = 1 if row else self._first_rows(shape.context, shape.drafted), self._place(row, shape)[-1]

        def make() -> Launch:
            buffers, session = self._buffers, self._session
            inputs = buffers.inputs.device
            ids = buffers.token(row - 1, shape)[0] if row else inputs[self._tensor("ids")].part(0, shape.batch, rows)
            positions = inputs[self._tensor("position", row)].part(0, shape.batch)
            logits = self._logits[row].part(0, shape.batch, of_logits, session.vocab_rows)
            written = self._feature_positions(row, shape)
            return session.bind(Pass(ids, positions, logits, shape.window, shape.first, written))

        return self._buffers.cached((self.name, "step", row, rows, of_logits, shape.window, shape.first, shape.batch), make)

    def _feature_positions(self, row: int, shape: Shape) -> Buffer | None:
        """Return where a step writes the features that the next one reads, if it does."""
        return None

    def _last_logits(self, row: int, shape: Shape) -> tuple[Buffer, list[Launch]]:
        """Return the logits [B, 1, V] from which a token is drawn, and the launches that copy them there."""
        step, at, rows = self._place(row, shape)
        whole, width, device = self._logits[step], self._session.vocab_rows, self._buffers.device
        if rows == 1:
            return whole.part(0, shape.batch, 1, width), []
        if shape.batch == 1:
            logits = whole.part(at * width, 1, 1, width)
            if logits.address % device.alignment == 0:
                return logits, []
        if row not in self._rows:
            self._rows[row] = device.zeros((self._buffers.batch, width), "float32", "the buffers of a round")
        own, matrix = self._rows[row].part(0, shape.batch, width), whole.part(0, shape.batch, rows * width)
        return own.part(0, shape.batch, 1, width), [device.copy_columns(own, 0, matrix, at * width, width)]

    def _sampler(self, row: int, shape: Shape) -> Launch:
        """Return the run of the sampler that draws a token."""
        buffers = self._buffers

        def make() -> Launch:
            logits, before = self._last_logits(row, shape)
            token, after = buffers.token(row, shape)
            tensors = {
                "logits": logits,
                "token": token,
                "status": buffers.outputs.device[f"status {row}"].part(0, shape.batch),
            }
            if not shape.greedy:
                q, keep = buffers.q_row(row, shape)
                after = after + keep
                tensors |= {
                    "drafted": buffers.drafted_matrix(shape),
                    "first_row": buffers.inputs.device[self._tensor("first_row", row)],
                    "uniforms": buffers.inputs.device[self._tensor("uniforms", row)].part(0, shape.batch, 2),
                    "q": q,
                }
            return in_sequence([*before, buffers.sampler(DRAFT_SAMPLERS[shape.greedy], tensors, shape), *after])

        source = self._source(row, shape)
        key = (self.name, "sampler", row, *source, shape.batch, shape.greedy, shape.edits, shape.candidates)
        return buffers.cached(key, make)

    def _source(self, row: int, shape: Shape) -> tuple[int, ...]:
        """Return the key of the place from which a sampler reads a token's logits."""
        return self._place(row, shape)

    def logits(self, row: int, shape: Shape, lane: int) -> Floats:
        logits: Floats = self._buffers.device.read(self._last_logits(row, shape)[0])[lane, 0]
        return logits

    def row_logits(self, row: int, shape: Shape, lane: int) -> Buffer:
        step, at, rows = self._place(row, shape)
        width = self._session.vocab_rows
        return self._logits[step].part((lane * rows + at) * width, 1, width)

    def confidence(self, row: int, shape: Shape) -> float:
        if not shape.greedy:
            return float(self._buffers.q.view()[row].max())
        return top_probability(self.logits(row, shape, 0), self._scratch)
