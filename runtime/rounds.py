"""One round on a device: which engines run, in which order, over which buffers.

    upload      what the host knows: last tokens, positions, random numbers          one copy
    draft       a step of the draft model, then the drafter, as often as asked       a token goes from each to the next
    verify      the target's pass over the last confirmed token and the drafted ones
    decide      the verifier
    download    what was accepted, the tokens, and every sampler's status            one copy, one wait

Nothing in between comes to the host, and every buffer has an address that never changes, so a device that can record
launches replays a whole round as one.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from outrider.engines.contract import CANDIDATES, EDITS, FINE, NOT_FINITE, SETTINGS
from outrider.engines.device import Arena, Buffer, CaptureError, Device, Engine, Launch, host_buffer
from outrider.engines.errors import EngineError, OutriderWarning
from outrider.engines.session import Floats, Session
from outrider.runtime import reference
from outrider.runtime.request import ACCEPTING, DRAFTING, DRAWING, Logprobs, Request

MOST_RECORDED = 64  # rounds kept recorded; each holds some memory of the device
VERIFIER = -1
Array = npt.NDArray[Any]


class Shape(NamedTuple):
    """What makes two rounds the same launches."""

    lead: int  # confirmed tokens that the draft's first step takes: 2, or 1 where there are no more
    drafted: int  # tokens to draft
    rows: int  # of the target's pass
    window: int
    edits: int  # entries of the table of edits
    candidates: int  # that top_k and top_p choose from
    top: int | None  # most likely tokens to report the logprobs of; None is no logprobs


@dataclass(frozen=True, slots=True)
class Step:
    """A launch of a round; a sampler's has a status."""

    launch: Launch
    status: Array | None = None  # int64 [B], on the host
    row: int = VERIFIER  # of the drafted token


class Rounds:
    """The buffers and launches of one sequence's rounds. `seconds` is what the launches took, waiting for them included."""

    def __init__(self, device: Device, sessions: dict[str, Session], samplers: dict[str, Engine], most: int):
        """`most` is the largest number of tokens to draft."""
        self.device = device
        self.sessions = sessions
        self.samplers = samplers
        self.seconds = 0.0
        self.vocab_rows = sessions["target"].vocab_rows
        self.most = most
        rows, draft_rows = most + 1, sessions["draft"].vocab_rows
        one, many = ((1,), "int64"), ((1, rows), "int64")
        self._in = Arena(
            device,
            {
                "draft_ids": ((1, 2), "int64"),
                "input_ids": many,
                "positions": one,
                "drafted_count": one,
                "verifying": ((1, rows, 3), "float32"),
                **{f"draft_position {row}": one for row in range(most)},
                **{f"first_row {row}": one for row in range(most)},
                **{f"drafting {row}": ((1, 2), "float32") for row in range(most)},
            },
        )
        for row in range(most):
            self._in.host[f"first_row {row}"][0] = row
        self._out = Arena(
            device,
            {
                "accepted": one,
                "tokens": many,
                "drafted": many,
                "status": one,
                **{f"status {row}": one for row in range(most)},
            },
        )
        what = "the logits of a round"
        self._draft_logits = [device.zeros((1, 2 if row == 0 else 1, draft_rows), "float32", what) for row in range(most)]
        self._target_logits = device.zeros((1, rows, self.vocab_rows), "float32", what)
        self._q = device.zeros((rows, 1, self.vocab_rows), "float32", what)
        limits = [engine.most_candidates for engine in samplers.values() if engine.most_candidates]
        self._most_candidates = min([self.vocab_rows, *limits])
        self._tables: dict[int, Arena] = {}  # by their number of edits
        self._sent: object = None  # the request's table that the device has
        self._lead = 2  # of the last round
        self.record = True  # False is plain launches, for who wants to compare the two
        self._logprobs: dict[int, Arena] = {}
        self._launches: dict[tuple[Any, ...], Any] = {}
        self._plans: dict[Shape, list[Step]] = {}
        self._recorded: dict[Shape, Launch] = {}

    def run(
        self, tokens: list[int], request: Request, count: int, rows: int
    ) -> tuple[list[int], list[int], list[Logprobs] | None]:
        """Draft `count` tokens after the confirmed `tokens`, and decide on them by one pass of `rows` rows; rows beyond
        the drafted tokens are padding that nobody looks at.

        Returns:
            the drafted tokens; the accepted ones and the target's own after them; and their logprobs where the request
            asks for them.

        Raises:
            EngineError: the rows do not fit the cache, logits are not finite numbers, or the backend failed.
        """
        top = request.params.logprobs
        at = len(tokens) - 1
        self._lead = min(2, len(tokens)) if count else 2
        shape = Shape(
            self._lead,
            count,
            rows,
            self.sessions["target"].window(rows, at, at),
            self._send_table(request),
            self._candidates(request.candidates),
            None if top is None else max(top, 1),
        )
        self._fill(tokens, request, shape)
        self._launch(shape, request)
        out = self._out.host
        emitted: list[int] = out["tokens"].reshape(-1)[: int(out["accepted"][0]) + 1].tolist()
        drafted: list[int] = out["drafted"][0, :count].tolist()
        return drafted, emitted, None if top is None else self._read_logprobs(len(emitted), rows, top)

    def draft_logits(self, row: int) -> Floats:
        """Of the last round: what the drafted token of that number was drawn from, [Vd]."""
        logits: Floats = self.device.read(self._draft_logits[row])
        return np.asarray(logits[0, self._lead - 1 if row == 0 else 0])

    def q(self, row: int) -> Floats:
        """Of the last round: the distribution that the drafter claims to have drawn from, [V]."""
        q: Floats = self.device.read(self._q)
        return np.asarray(q[row, 0])

    def target_logits(self, rows: int) -> Floats:
        """Of the last round: [S, V]."""
        return self.device.read(self._target_logits.part(0, rows, self.vocab_rows))

    def _candidates(self, wanted: int) -> int:
        """The number to begin with: few different ones, because each has launches of its own."""
        enough = (size for size in (1, *CANDIDATES) if size >= wanted)
        return min(next(enough, self.vocab_rows), self._most_candidates)

    def _send_table(self, request: Request) -> int:
        """Bring the request's settings and edits to the device, where it has others. Returns how many edits that are."""
        edit_ids, edits = table = request.table()
        size = 1
        while size < edit_ids.shape[1]:
            size *= 4  # few different sizes, for the same reason
        size = min(size, max(self.vocab_rows, 1))
        if self._sent is table:
            return size
        if size not in self._tables:
            layout = {
                "settings": ((1, len(SETTINGS)), "float32"),
                "edit_ids": ((1, size), "int64"),
                "edits": ((1, size, len(EDITS)), "float32"),
            }
            self._tables[size] = Arena(self.device, layout)
        arena, count = self._tables[size], edit_ids.shape[1]
        arena.host["settings"][...] = request.settings
        for name, values in (("edit_ids", edit_ids), ("edits", edits)):
            arena.host[name][:, :count] = values
            arena.host[name][:, count:] = values[:, :1]  # entries of one token must be equal
        arena.upload()
        self._sent = table
        return size

    def _fill(self, tokens: list[int], request: Request, shape: Shape) -> None:
        """Write down what the round is to read from the host."""
        host = self._in.host
        at = len(tokens) - 1
        host["input_ids"].reshape(-1)[: shape.rows] = tokens[-1]
        host["positions"][0] = at
        host["drafted_count"][0] = shape.drafted
        uniforms = request.uniforms(request.emitted, shape.rows)
        host["verifying"].reshape(-1)[: 3 * shape.rows] = uniforms[:, ACCEPTING.start : DRAWING.stop].reshape(-1)
        if shape.drafted:
            # A target with more padding rows than the draft could emit a token that the draft's embedding lacks; it is
            # fed the nearest it has, and what it makes of that costs acceptance and nothing else.
            last = self.sessions["draft"].vocab_rows - 1
            host["draft_ids"].reshape(-1)[: shape.lead] = [min(token, last) for token in tokens[-shape.lead :]]
            drawing = DRAWING if request.exact else DRAFTING
            for row in range(shape.drafted):
                host[f"draft_position {row}"][0] = at + row if row else at + 1 - shape.lead
                host[f"drafting {row}"][...] = uniforms[row, drawing]

    def _launch(self, shape: Shape, request: Request) -> None:
        """The round; and where top_k or top_p reach beyond the candidates, on from there with more, until all is decided."""
        steps, first = self._plan(shape), 0
        while (at := self._advance(shape, steps, first)) is not None:
            row, status = steps[at].row, steps[at].status
            assert status is not None
            if status[0] == NOT_FINITE:
                raise EngineError(
                    "the model's logits are not finite numbers (NaN or infinity)",
                    "check the checkpoint; an fp16 export may overflow where fp32 or bf16 does not",
                )
            if shape.candidates < self._most_candidates:
                more = (size for size in CANDIDATES if shape.candidates < size)
                shape = shape._replace(candidates=min(next(more, self.vocab_rows), self._most_candidates))
                steps, first = self._plan(shape), at
            else:
                self._decide(row, shape, request)
                first = at + 1

    def _advance(self, shape: Shape, steps: list[Step], first: int) -> int | None:
        """Launch the steps from `first` on, and return the first that did not decide, if there is one."""
        if self.device.synchronous:
            for at, step in enumerate(steps[first:], first):
                started = time.perf_counter()
                step.launch()
                self.seconds += time.perf_counter() - started
                if step.status is not None and step.status[0] != FINE:
                    return at
            return None
        started = time.perf_counter()
        if first == 0 and self.record and shape in self._recorded:
            self._recorded[shape]()
            self.device.synchronize()
        else:
            self._launch_all(steps[first:])
        self.seconds += time.perf_counter() - started
        later = list(enumerate(steps))[first:]
        undecided = next((at for at, step in later if step.status is not None and step.status[0] != FINE), None)
        if first == 0 and undecided is None and self.record and shape not in self._recorded:
            self._record(shape, steps)
        return undecided

    def _launch_all(self, steps: list[Step]) -> None:
        for step in steps:
            step.launch()
        self._out.download()
        self.device.synchronize()

    def _record(self, shape: Shape, steps: list[Step]) -> None:
        """Record a round that has just run; from now on it is replayed, if the replay decides as the launches did."""
        while len(self._recorded) >= MOST_RECORDED:
            del self._recorded[next(iter(self._recorded))]
        decided = [values.copy() for values in self._out.host.values()]
        try:
            replay = self.device.capture([*(step.launch for step in steps), self._out.download])
            replay()
            self.device.synchronize()
            if any((now != before).any() for now, before in zip(self._out.host.values(), decided, strict=True)):
                raise CaptureError("its replay decided otherwise than the launches themselves")
        except CaptureError as error:
            warnings.warn(f"a round of k = {shape.drafted} runs as plain launches: {error}", OutriderWarning, stacklevel=2)

            def replay() -> None:
                for step in steps:
                    step.launch()
                self._out.download()

            self._launch_all(steps)
        self._recorded[shape] = replay

    def _plan(self, shape: Shape) -> list[Step]:
        """The launches of a round, in order; steps of the same number mean the same in rounds that differ in candidates."""
        if shape not in self._plans:
            steps = [Step(self._in.upload)]
            for row in range(shape.drafted):
                steps.append(Step(self._draft_step(row, shape)))
                steps.append(Step(self._drafter(row, shape), self._out.host[f"status {row}"], row))
            steps.append(Step(self._target_pass(shape)))
            steps.append(Step(self._verifier(shape), self._out.host["status"]))
            if shape.top is not None:
                steps.append(Step(self._logprobs_run(shape, shape.top)))
            self._plans[shape] = steps
        return self._plans[shape]

    def _draft_step(self, row: int, shape: Shape) -> Launch:
        lead = shape.lead if row == 0 else 1
        name = ("draft", row, lead, shape.window)
        if name not in self._launches:
            ids = self._in.device["draft_ids"].part(0, 1, lead) if row == 0 else self._token(row - 1)[0]
            logits = self._draft_logits[row].part(0, 1, lead, self._draft_logits[row].shape[2])
            position = self._in.device[f"draft_position {row}"]
            self._launches[name] = self.sessions["draft"].bind(ids, position, logits, shape.window)
        launch: Launch = self._launches[name]
        return launch

    def _token(self, row: int) -> tuple[Buffer, list[Launch]]:
        """Where a drafter's run writes its token, and what brings it from there to the other drafted ones."""
        return self._slot("token", self._out.device["drafted"], row, 1, 1)

    def _slot(self, name: str, whole: Buffer, first: int, *shape: int) -> tuple[Buffer, list[Launch]]:
        """A tensor that an engine may write, to become a part of `whole`: the part itself where its address will do."""
        part = whole.part(first, *shape)
        if part.address % self.device.alignment == 0:
            return part, []
        if (name, first) not in self._launches:
            own = self.device.zeros(shape, whole.dtype, "the buffers of a round")
            self._launches[name, first] = own, [self.device.copy_columns(_flat(whole), first, _flat(own), 0, _size(own))]
        slot: tuple[Buffer, list[Launch]] = self._launches[name, first]
        return slot

    def _drafter(self, row: int, shape: Shape) -> Launch:
        lead = shape.lead if row == 0 else 1
        name = ("drafter", row, lead, shape.edits, shape.candidates)
        if name not in self._launches:
            whole, width = self._draft_logits[row], self._draft_logits[row].shape[2]
            logits, before = whole.part((lead - 1) * width, 1, 1, width), []
            if logits.address % self.device.alignment:
                logits = self.device.zeros((1, 1, width), "float32", "the buffers of a round")
                before = [self.device.copy_columns(_flat(logits), 0, _flat(whole), (lead - 1) * width, width)]
            token, after = self._token(row)
            q, keep = self._slot("q", self._q, row * self.vocab_rows, 1, self.vocab_rows)
            tensors = {
                "logits": logits,
                "drafted": self._out.device["drafted"],
                "first_row": self._in.device[f"first_row {row}"],
                "uniforms": self._in.device[f"drafting {row}"],
                "token": token,
                "q": q,
                "status": self._out.device[f"status {row}"],
            }
            launch = self._sampler("drafter", tensors, shape)
            self._launches[name] = _sequence([*before, launch, *after, *keep])
        made: Launch = self._launches[name]
        return made

    def _target_pass(self, shape: Shape) -> Launch:
        name = ("target", shape.drafted, shape.rows, shape.window)
        if name not in self._launches:
            ids = self._in.device["input_ids"].part(0, 1, shape.rows)
            logits = self._target_logits.part(0, 1, shape.rows, self.vocab_rows)
            launches = [self.sessions["target"].bind(ids, self._in.device["positions"], logits, shape.window)]
            if shape.drafted:
                drafted = self._out.device["drafted"]
                launches.insert(0, self.device.copy_columns(ids, 1, drafted, 0, shape.drafted))
            self._launches[name] = _sequence(launches)
        made: Launch = self._launches[name]
        return made

    def _verifier(self, shape: Shape) -> Launch:
        name = ("verifier", shape.rows, shape.edits, shape.candidates)
        if name not in self._launches:
            rows = shape.rows
            tensors = {
                "logits": self._target_logits.part(0, 1, rows, self.vocab_rows),
                "drafted": self._out.device["drafted"].part(0, 1, rows),
                "drafted_count": self._in.device["drafted_count"],
                "q": self._q.part(0, rows, 1, self.vocab_rows),
                "uniforms": self._in.device["verifying"].part(0, 1, rows, 3),
                "accepted": self._out.device["accepted"],
                "tokens": self._out.device["tokens"].part(0, 1, rows),
                "status": self._out.device["status"],
            }
            self._launches[name] = self._sampler("verifier", tensors, shape)
        made: Launch = self._launches[name]
        return made

    def _sampler(self, name: str, tensors: dict[str, Buffer], shape: Shape) -> Launch:
        """A run of a sampler over these tensors and the table."""
        candidates = host_buffer(np.array([shape.candidates], dtype=np.int64))
        return self.samplers[name].bind(tensors | self._tables[shape.edits].device | {"candidates": candidates})

    def _logprobs_run(self, shape: Shape, top: int) -> Launch:
        name = ("logprobs", shape.rows, top)
        if name not in self._launches:
            most, rows = self.most + 1, shape.rows
            if top not in self._logprobs:
                layout = {
                    "logprobs": ((1, most), "float32"),
                    "top_ids": ((1, most, top), "int64"),
                    "top_logprobs": ((1, most, top), "float32"),
                }
                self._logprobs[top] = Arena(self.device, layout)
            arena = self._logprobs[top]
            tensors = {
                "logits": self._target_logits.part(0, 1, rows, self.vocab_rows),
                "tokens": self._out.device["tokens"].part(0, 1, rows),
                "candidates": host_buffer(np.array([top], dtype=np.int64)),
                "logprobs": arena.device["logprobs"].part(0, 1, rows),
                "top_ids": arena.device["top_ids"].part(0, 1, rows, top),
                "top_logprobs": arena.device["top_logprobs"].part(0, 1, rows, top),
            }
            self._launches[name] = _sequence([self.samplers["logprobs"].bind(tensors), arena.download])
        made: Launch = self._launches[name]
        return made

    def _read_logprobs(self, count: int, rows: int, top: int) -> list[Logprobs]:
        host = {name: values.reshape(-1) for name, values in self._logprobs[max(top, 1)].host.items()}
        width = max(top, 1)
        found = []
        for row in range(count):
            best = slice(row * width, row * width + top)
            pairs = zip(host["top_ids"][best].tolist(), host["top_logprobs"][best].tolist(), strict=True)
            found.append(Logprobs(float(host["logprobs"][row]), tuple(pairs)))
        return found

    def _decide(self, row: int, shape: Shape, request: Request) -> None:
        """What a sampler's graph could not decide, because TensorRT's TopK takes no more candidates: on the host, exactly,
        and slowly. Nearly flat distributions alone come here."""
        settings = reference.named_settings(request.settings[0])
        edits = reference.edits_of(*request.table())
        drafted = self.device.read(self._out.device["drafted"])[0].tolist()
        if row == VERIFIER:
            tokens = reference.verify(
                self.target_logits(shape.rows).astype(np.float64),
                drafted[: shape.drafted],
                self.device.read(self._q)[: shape.drafted, 0].astype(np.float64),
                settings,
                request.uniforms(request.emitted, shape.drafted + 1)[:, ACCEPTING.start : DRAWING.stop],
                edits,
            )
            padded = np.array([tokens + [-1] * (shape.rows - len(tokens))])
            self.device.write(self._out.device["tokens"].part(0, 1, shape.rows), padded)
            self.device.write(self._out.device["accepted"], np.array([len(tokens) - 1]))
            self.device.write(self._out.device["status"], np.array([FINE]))
            return
        p = reference.draft(self.draft_logits(row), self.vocab_rows, settings, edits, drafted[:row])
        uniforms = request.uniforms(request.emitted + row, 1)[0]
        token = np.array([[reference.draw(p, uniforms[DRAWING if request.exact else DRAFTING])]])
        self.device.write(self._q.part(row * self.vocab_rows, 1, self.vocab_rows), p[None].astype(np.float32))
        self.device.write(self._out.device["drafted"].part(row, 1, 1), token)
        self.device.write(self._token(row)[0], token)
        self.device.write(self._out.device[f"status {row}"], np.array([FINE]))


def _sequence(launches: list[Launch]) -> Launch:
    """Several launches as one."""
    if len(launches) == 1:
        return launches[0]

    def launch() -> None:
        for each in launches:
            each()

    return launch


def _size(buffer: Buffer) -> int:
    return buffer.nbytes // buffer.itemsize


def _flat(buffer: Buffer) -> Buffer:
    """The same as a matrix of one row."""
    return buffer.part(0, 1, _size(buffer))
