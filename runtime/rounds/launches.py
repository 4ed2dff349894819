"""The launches of a round, over buffers at fixed addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from cachetools import LRUCache

from outrider.engines.device import Arena, Buffer, Device, Engine, Launch, in_sequence
from outrider.engines.samplers import CANDIDATES, EDITS, SETTINGS
from outrider.engines.session import Pass, Session
from outrider.runtime.drafters.base import DeviceDrafter
from outrider.runtime.policy.choice import NONE
from outrider.runtime.rounds.buffers import MAX_CACHED, Lane, RoundBuffers, Shape, Step
from outrider.runtime.rounds.logprobs import LogprobsRuns
from outrider.runtime.rounds.sampling import ACCEPTING, DRAWING, SamplingState

# For slots that take no part in a round: greedy, with one edit that changes nothing.
NO_EDITS = np.zeros((1, 1), dtype=np.int64), np.zeros((1, 1, len(EDITS)), dtype=np.float32)
NO_SETTINGS = np.array([1.0 if name in ("top_p", "repetition_penalty") else 0.0 for name in SETTINGS], dtype=np.float32)


class Launches(RoundBuffers):
    """The buffers of rounds, and the launches that read and write them."""

    def __init__(
        self, device: Device, target: Session, samplers: Mapping[str, Engine], drafters: Sequence[DeviceDrafter], max_k: int
    ):
        """Prepare rounds of up to `max_k` drafted tokens."""
        super().__init__(device, target, samplers, [drafter.layout(target.batch, max_k) for drafter in drafters], max_k)
        self._drafters = {drafter.name: drafter for drafter in drafters}
        self._sent: list[tuple[object, bool]] = []  # by lane: the table on the device, and whether the rule is exact-match
        self.logprobs = LogprobsRuns(self)
        self._steps: LRUCache[Shape, list[Step]] = LRUCache(MAX_CACHED)
        for drafter in drafters:
            drafter.attach(self)

    # The shape

    def shape(self, lanes: Sequence[Lane], first: int, rows: int, drafter: str) -> Shape:
        """Return the shape of a round of the slots from `first` on, with `rows` rows in the target's pass.

        Raises:
            EngineError: the rows do not fit the cache.
        """
        positions = [lane.position for lane in lanes]
        samplings = [lane.sampling for lane in lanes if lane.sampling is not None]
        greedy = all(sampling.greedy for sampling in samplings)
        tops = [max(sampling.params.logprobs, 1) for sampling in samplings if sampling.params.logprobs is not None]
        drafted = max(lane.steps for lane in lanes)
        return Shape(
            first,
            len(lanes),
            drafter if drafted else NONE,
            self._drafters[drafter].context_rows(lanes) if drafted else 0,
            drafted,
            rows,
            self.target.window(rows, min(positions), max(positions)),
            greedy,
            0 if greedy else self._table_size(samplings),
            0 if greedy else self._candidates(max(sampling.candidates for sampling in samplings)),
            max(tops, default=None),
        )

    def on_device(self, shape: Shape) -> DeviceDrafter | None:
        """Return the drafter whose launches are part of the round, if there is one. It uses these buffers from now on."""
        drafter = self._drafters.get(shape.drafter)
        if drafter is not None:
            drafter.use(self)
        return drafter

    def _candidates(self, minimum: int) -> int:
        """Return the number of candidates to start with. Few numbers are used, because each has its own launches."""
        sufficient = (size for size in (1, *CANDIDATES) if size >= minimum)
        return min(next(sufficient, self.vocab_rows), self.max_candidates)

    def _table_size(self, samplings: Sequence[SamplingState]) -> int:
        """Return the size of the tables of edits. Few sizes are used, because each has its own launches."""
        size, longest = 1, max(sampling.table()[0].shape[1] for sampling in samplings)
        while size < longest:
            size *= 4
        return min(size, self.vocab_rows)

    # The inputs

    def fill(self, lanes: Sequence[Lane], shape: Shape) -> None:
        """Write the round's inputs, and upload the requests' settings if they have changed."""
        host, rows, batch = self.inputs.host, shape.rows, shape.batch
        ids = host["input_ids"][: batch * rows].reshape(batch, rows)
        positions, counts = host["positions"], host["drafted_count"]
        drafter, self._lanes = self.on_device(shape), lanes
        for index, (tokens, sampling, _, k, proposed, position, _) in enumerate(lanes):
            positions[index], counts[index] = position, k
            if sampling is None:
                ids[index] = 0
                continue
            ids[index, 0] = tokens[-1]
            if proposed:
                begin = index * rows
                ids[index, 1 : 1 + k] = host["proposed"][begin : begin + k] = proposed
            if not shape.greedy:
                uniforms = sampling.uniforms(sampling.emitted, rows)[:, ACCEPTING.start : DRAWING.stop]
                host["verifying"][index * rows * 3 : (index + 1) * rows * 3] = uniforms.reshape(-1)
        if drafter is not None:
            drafter.fill(lanes, shape)
        certain = [int(lane.sampling is not None) for lane in lanes]
        self.target.advance(shape.first, positions[:batch], rows, certain, host["pending"], host["committed"])
        if not shape.greedy:
            self._send_tables(lanes, shape)

    def _send_tables(self, lanes: Sequence[Lane], shape: Shape) -> None:
        """Upload the requests' settings and edits if they have changed.

        Tokens proposed on the host were not drawn from a distribution. Exact-match accepts one if the target draws the same,
        which keeps the target's distribution and accepts as often as possible: with the target's probability of the token.
        """
        tables = [NO_EDITS if lane.sampling is None else lane.sampling.table() for lane in lanes]
        exact = [lane.sampling is not None and (bool(lane.proposed) or lane.sampling.exact) for lane in lanes]
        current: list[tuple[object, bool]] = [*zip(tables, exact, strict=True)]
        if len(current) == len(self._sent) and all(
            table is sent and rule == before for (table, rule), (sent, before) in zip(current, self._sent, strict=True)
        ):
            return
        size = shape.edits
        if size not in self._tables:
            layout = {
                "settings": ((self.batch, len(SETTINGS)), "float32"),
                "edit_ids": ((self.batch, size), "int64"),
                "edits": ((self.batch, size, len(EDITS)), "float32"),
            }
            self._tables[size] = Arena(self.device, layout)
        host = self._tables[size].host
        for index, lane in enumerate(lanes):
            edit_ids, edits = tables[index]
            count = edit_ids.shape[1]
            host["settings"][index] = NO_SETTINGS if lane.sampling is None else lane.sampling.settings[0]
            host["settings"][index, SETTINGS.index("exact_match")] = exact[index]
            for name, values in (("edit_ids", edit_ids), ("edits", edits)):
                host[name][index, :count] = values[0]
                host[name][index, count:] = values[0, :1]  # a token's entries must be equal
        self._tables[size].upload()
        self._sent = current

    # The launches

    def steps(self, shape: Shape) -> list[Step]:
        """Return the launches of a round, in order. Shapes that differ only in candidates have corresponding steps."""
        steps = self._steps.get(shape)
        if steps is None:
            drafter = self.on_device(shape)
            steps = [Step(self.inputs.upload), *(drafter.steps(shape) if drafter is not None else ())]
            steps += [*self._target_pass(shape), Step(self._verifier(shape), self.outputs.host["status"])]
            if shape.top is not None:
                steps.append(Step(self.logprobs.run(shape)))
            self._steps[shape] = steps
        return steps

    def _target_pass(self, shape: Shape) -> list[Step]:
        on_device = shape.drafter in self._drafters

        def make() -> list[Step]:
            ids = self.inputs.device["input_ids"].part(0, shape.batch, shape.rows)
            positions, drafted = (self.inputs.device[name].part(0, shape.batch) for name in ("positions", "drafted_count"))
            logits = self.target_logits.part(0, shape.batch, shape.rows, self.vocab_rows)
            buffers = Pass(ids, positions, logits, shape.window, shape.first, drafted=drafted)
            if self.target.recurrence is not None:
                pending, committed = (self.inputs.device[name].part(0, shape.batch) for name in ("pending", "committed"))
                buffers = replace(buffers, commits=(pending, committed))
            first, *others = self.target.bind_parts(buffers)
            launches = [first]
            if on_device:
                matrix = self.drafted_matrix(shape)
                launches.insert(0, self.device.copy_columns(ids, 1, matrix, 0, shape.rows - 1))
                if self.device.synchronous:  # otherwise all lanes draft on the device
                    launches.insert(0, lambda: self._put_proposed(matrix))
            return [Step(in_sequence(launches)), *(Step(each, waits=True) for each in others)]

        return self.cached(("target", on_device, shape.rows, shape.window, shape.first, shape.batch), make)

    def _put_proposed(self, matrix: Buffer) -> None:
        """Replace the drafted tokens of lanes whose tokens were proposed on the host."""
        for index, lane in enumerate(self._lanes):
            matrix.view()[index, : len(lane.proposed)] = lane.proposed

    def _verifier(self, shape: Shape) -> Launch:
        batch, rows = shape.batch, shape.rows
        on_device = shape.drafter in self._drafters

        def make() -> Launch:
            drafted, before = self._drafted_rows(shape, on_device)
            tensors = {
                "logits": self.target_logits.part(0, batch, rows, self.vocab_rows),
                "drafted": drafted,
                "drafted_count": self.inputs.device["drafted_count"].part(0, batch),
                "accepted": self.outputs.device["accepted"].part(0, batch),
                "tokens": self.outputs.device["tokens"].part(0, batch, rows),
                "status": self.outputs.device["status"].part(0, batch),
            }
            if shape.greedy:
                return in_sequence([*before, self.sampler("greedy_verifier", tensors, shape)])
            tensors |= {
                "q": self.q.part(0, rows, batch, self.vocab_rows),
                "uniforms": self.inputs.device["verifying"].part(0, batch, rows, 3),
            }
            return in_sequence([*before, self.sampler("verifier", tensors, shape)])

        return self.cached(("verifier", rows, batch, on_device, shape.greedy, shape.edits, shape.candidates), make)

    def _drafted_rows(self, shape: Shape, on_device: bool) -> tuple[Buffer, list[Launch]]:
        """Return the drafted tokens [B, S] for the verifier, and the launches that copy them there."""
        batch, rows = shape.batch, shape.rows
        if not on_device:
            return self.inputs.device["proposed"].part(0, batch, rows), []
        drafted = self.drafted_matrix(shape)
        if batch == 1:
            return drafted.part(0, 1, rows), []
        if rows > self.max_k:
            return drafted, []
        narrow = self.device.zeros((batch, rows), "int64", "the buffers of a round")
        return narrow, [self.device.copy_columns(narrow, 0, drafted, 0, rows)]

    def shorten(self, shape: Shape, drafted: int, rows: int) -> Shape:
        """Return the shape of the running round of one sequence with fewer tokens, if the memory is the host's."""
        self.inputs.host["drafted_count"][0] = drafted
        return shape._replace(drafted=drafted, rows=rows)
