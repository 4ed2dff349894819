"""Drafting by a second, smaller language model with the target's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from outrider.engines.arrays import Floats
from outrider.engines.device import Buffer, Launch, Layout
from outrider.runtime.buffers import Lane, Shape, Step
from outrider.runtime.drafters.base import DeviceDrafter, Resources
from outrider.runtime.sampling import DRAFTING, DRAWING

if TYPE_CHECKING:
    from outrider.bundle.manifest import Manifest
    from outrider.runtime.costs import Costs
    from outrider.runtime.launches import Launches

CONTEXT = 2  # confirmed tokens that a round's first step reads; see `ModelDrafter.catch_up`
SAMPLERS = ("drafter", "greedy_drafter")  # by whether the round is greedy


def top_probability(logits: Floats, scratch: Floats) -> float:
    """Return softmax's probability of the likeliest token, 1 / sum(exp(x - max x)); both arrays are float32 [V]."""
    np.subtract(logits, logits.max(), out=scratch)
    return float(1 / np.exp(scratch, out=scratch).sum())


class ModelDrafter(DeviceDrafter):
    """A draft model with a KV cache of its own, which drafts one token a step."""

    name = "model"
    label = "draft model"
    prior = 0.6
    role = "draft"
    engines = (role, *SAMPLERS)
    batched_context = CONTEXT

    def __init__(self, resources: Resources):
        super().__init__(resources)
        self._session = resources.sessions[self.role]
        self._chunk = resources.max_prompt_chunk
        # For each slot the token behind each entry of the cache, whether confirmed or only drafted, and how many of them
        # are known to be confirmed.
        self._written: list[list[int]] = [[] for _ in range(resources.slots)]
        self._agreed = [0] * resources.slots
        self._top_token = self._session.vocab_rows - 1
        self._target_rows = resources.sessions["target"].vocab_rows

    @classmethod
    def available(cls, manifest: Manifest) -> bool:
        return cls.role in manifest.models

    # The cache

    def written(self, slot: int) -> list[int]:
        """Return the token behind each entry of a slot's cache, whether confirmed or only drafted."""
        return self._written[slot]

    def truncate(self, slot: int, length: int) -> None:
        del self._written[slot][length:]
        self._agreed[slot] = min(self._agreed[slot], length)

    def move(self, source: int, target: int) -> None:
        self._session.move(source, target, len(self._written[source]))
        self._written[target], self._written[source] = self._written[source], []
        self._agreed[target], self._agreed[source] = self._agreed[source], 0

    def clear(self, slot: int) -> None:
        self._session.clear(slot)
        self.truncate(slot, 0)

    def pending(self, slot: int, tokens: list[int]) -> int:
        written, agreed = self._written[slot], self._agreed[slot]
        end = min(len(written), len(tokens))
        while agreed < end and written[agreed] == tokens[agreed]:
            agreed += 1
        self._agreed[slot] = agreed
        return max(len(tokens) - CONTEXT - agreed, 0)

    def catch_up(self, slot: int, tokens: list[int], chunks: int | None = None) -> None:
        """Write cache entries for all confirmed tokens but the last two, or at most so many chunks of them.

        A round's first step writes these two itself: after a round in which every drafted token was accepted, the entry
        of the last but one is missing; otherwise it is written again with the same value. One shape serves both cases.
        """
        self.pending(slot, tokens)
        for at in range(self._agreed[slot], len(tokens) - CONTEXT, self._chunk)[:chunks]:
            chunk = tokens[at : min(at + self._chunk, len(tokens) - CONTEXT)]
            del self._written[slot][at:]
            self._session.write(np.array([self._known(chunk)]), np.array([at]), slot)
            self._written[slot] += chunk

    def _known(self, tokens: list[int]) -> list[int]:
        """Replace tokens that the draft's embedding lacks, because the target has more padding rows, by the nearest that it
        has; what the draft makes of them costs acceptance and nothing else."""
        return [min(token, self._top_token) for token in tokens]

    def commit(self, slot: int, tokens: list[int], drafted: list[int]) -> None:
        # The round wrote entries for the last two confirmed tokens and for all drafted ones but the last. Where it drafted
        # nothing for this slot, what it wrote there belongs to no token.
        at = max(len(tokens) - CONTEXT, 0)
        self._written[slot][at:] = [*tokens[at:], *drafted[:-1]] if drafted else []
        self._agreed[slot] = min(self._agreed[slot], len(self._written[slot]))

    # Costs

    @classmethod
    def cost(cls, costs: Costs, drafted: int, end: int, greedy: bool) -> float:
        if not drafted:
            return 0.0
        steps = costs.step(cls.role, CONTEXT, end) + (drafted - 1) * costs.step(cls.role, 1, end)
        return steps + drafted * costs.sampler(SAMPLERS[greedy], 1)

    @classmethod
    def catch_up_cost(cls, costs: Costs, tokens: int, end: int) -> float:
        whole, rest = divmod(max(tokens, 0), costs.chunk)
        return (whole and whole * costs.step(cls.role, costs.chunk, end)) + (rest and costs.step(cls.role, rest, end))

    @classmethod
    def upkeep(cls, costs: Costs, end: int) -> float:
        return costs.step(cls.role, CONTEXT, end)

    # The round

    def context_rows(self, lanes: Sequence[Lane]) -> int:
        # A batch may have a sequence of a single token, which drafts nothing in its first round.
        return min(CONTEXT, len(lanes[0].tokens)) if len(lanes) == 1 else CONTEXT

    def layout(self, batch: int, max_k: int) -> Layout:
        rows = range(max_k)
        return {
            "draft_ids": ((batch * CONTEXT,), "int64"),
            **{f"draft_position {row}": ((batch,), "int64") for row in rows},
            **{f"drafting {row}": ((batch, 2), "float32") for row in rows},
            **{f"first_row {row}": ((1,), "int64") for row in rows},
        }

    def attach(self, launches: Launches) -> None:
        self._launches = launches
        self._scratch = np.empty(self._session.vocab_rows, dtype=np.float32)
        inputs, device = launches.inputs, launches.device
        self._ids = inputs.host["draft_ids"]
        self._positions = [inputs.host[f"draft_position {row}"] for row in range(launches.max_k)]
        self._uniforms = [inputs.host[f"drafting {row}"] for row in range(launches.max_k)]
        for row in range(launches.max_k):
            inputs.host[f"first_row {row}"][0] = row
        self._logits = [
            device.zeros(
                (launches.batch * (1 if row else CONTEXT), self._session.vocab_rows), "float32", "the logits of a round"
            )
            for row in range(launches.max_k)
        ]
        self._rows: dict[tuple[int, int], tuple[Buffer, list[Launch]]] = {}

    def fill(self, lanes: Sequence[Lane], shape: Shape) -> None:
        context, drafted = shape.context, shape.drafted
        ids = self._ids[: shape.batch * context].reshape(shape.batch, context)
        for index, lane in enumerate(lanes):
            sampling = lane.sampling
            if sampling is None:  # a slot between others: its pass writes where no entry is needed
                ids[index] = 0
                written = self._written[shape.first + index]
                start = min(len(written), self._session.capacity - context - drafted + 1)
                self.truncate(shape.first + index, start)
                after = start + context
            else:
                tokens = lane.tokens
                ids[index] = self._known(tokens[-context:])
                start = max(len(tokens) - context, 0)  # a batched sequence of one token, which drafts nothing
                after = start + context
                if not shape.greedy:
                    uniforms = sampling.uniforms(sampling.emitted, drafted)[:, DRAWING if sampling.exact else DRAFTING]
                    for step in range(drafted):
                        self._uniforms[step][index] = uniforms[step]
            for step in range(drafted):
                self._positions[step][index] = after + step - 1 if step else start

    def steps(self, shape: Shape) -> list[Step]:
        steps = []
        for row in range(shape.drafted):
            steps.append(Step(self._step(row, shape)))
            steps.append(Step(self._sampler(row, shape), self._launches.outputs.host[f"status {row}"], row))
        return steps

    def _step(self, row: int, shape: Shape) -> Launch:
        """The pass that gives the logits of a drafted token."""
        rows = 1 if row else shape.context

        def make() -> Launch:
            launches = self._launches
            ids = launches.inputs.device["draft_ids"].part(0, shape.batch, rows)
            if row:
                ids = launches.token(row - 1, shape)[0]
            positions = launches.inputs.device[f"draft_position {row}"].part(0, shape.batch)
            answered = 1 if self._session.engine.skips_logits else rows
            logits = self._logits[row].part(0, shape.batch, answered, self._session.vocab_rows)
            return self._session.bind(ids, positions, logits, shape.window, shape.first)

        return self._launches.cached((self.name, "step", row, rows, shape.window, shape.first, shape.batch), make)

    def _last_logits(self, row: int, shape: Shape) -> tuple[Buffer, list[Launch]]:
        """The logits [B, 1, Vd] that a token is drawn from, and the launches that bring them there."""
        rows = 1 if row or self._session.engine.skips_logits else shape.context
        whole, width, device = self._logits[row], self._session.vocab_rows, self._launches.device
        if rows == 1:
            return whole.part(0, shape.batch, 1, width), []
        logits = whole.part((rows - 1) * width, shape.batch, 1, width)
        if shape.batch == 1 and logits.address % device.alignment == 0:
            return logits, []
        if (row, shape.batch) not in self._rows:
            own = device.zeros((shape.batch, 1, width), "float32", "the buffers of a round")
            matrix = whole.part(0, shape.batch, rows * width)
            copy = device.copy_columns(own.part(0, shape.batch, width), 0, matrix, (rows - 1) * width, width)
            self._rows[row, shape.batch] = own, [copy]
        return self._rows[row, shape.batch]

    def _sampler(self, row: int, shape: Shape) -> Launch:
        """The run of the sampler that draws a token from the logits of a step."""
        launches = self._launches
        rows = 1 if row else shape.context

        def make() -> Launch:
            logits, before = self._last_logits(row, shape)
            token, after = launches.token(row, shape)
            tensors = {
                "logits": logits,
                "token": token,
                "status": launches.outputs.device[f"status {row}"].part(0, shape.batch),
            }
            if not shape.greedy:
                q, keep = launches.q_row(row, shape)
                after = after + keep
                tensors |= {
                    "drafted": launches.drafted_matrix(shape),
                    "first_row": launches.inputs.device[f"first_row {row}"],
                    "uniforms": launches.inputs.device[f"drafting {row}"].part(0, shape.batch, 2),
                    "q": q,
                }
            return launches.sequence([*before, launches.sampler(SAMPLERS[shape.greedy], tensors, shape), *after])

        key = (self.name, "sampler", row, rows, shape.batch, shape.greedy, shape.edits, shape.candidates)
        return launches.cached(key, make)

    def logits(self, row: int, shape: Shape, lane: int) -> Floats:
        logits: Floats = self._launches.device.read(self._last_logits(row, shape)[0])[lane, 0]
        return logits

    def confidence(self, row: int, shape: Shape) -> float:
        if not shape.greedy:
            return float(self._launches.q_view(row).max())
        return top_probability(self.logits(row, shape, 0), self._scratch)

    def agreement(self, prompt: list[int], tokens: list[int]) -> tuple[list[bool], list[float]]:
        session = self._session
        text = self._known((prompt + tokens)[:-1])
        agrees: list[bool] = []
        confidences: list[float] = []
        for at in range(0, len(text), self._chunk):
            chunk = text[at : at + self._chunk]
            ids, position = np.array([chunk], dtype=np.int64), np.array([at], dtype=np.int64)
            if at + len(chunk) < len(prompt):
                session.write(ids, position)
                continue
            rows = session.run(ids, position)[0, max(len(prompt) - 1 - at, 0) :, : self._target_rows]
            expected = np.array(tokens[len(agrees) : len(agrees) + len(rows)])
            agrees += (rows.argmax(-1) == expected).tolist()
            confidences += [round(top_probability(row, np.empty_like(row)), 4) for row in rows]
        self.truncate(0, 0)
        return agrees, confidences
