"""The buffers of a round, each at an address that never changes, and the launches over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from outrider.engines.contract import CANDIDATES, EDITS, FINE, SETTINGS
from outrider.engines.device import Arena, Buffer, Device, Engine, Launch, host_buffer
from outrider.engines.session import Floats, Session
from outrider.runtime.request import ACCEPTING, DRAFTING, DRAWING, Logprobs, Request

VERIFIER = -1
Array = npt.NDArray[Any]


class Shape(NamedTuple):
    """What makes two rounds the same launches."""

    lead: int  # confirmed tokens that the draft's first step takes: 2, or 1 where there are no more
    drafted: int  # tokens to draft
    given: bool  # whether they come from the host, and not from the draft
    rows: int  # of the target's pass
    window: int
    greedy: bool  # the samplers that need no table, random numbers or candidates
    edits: int  # entries of the table of edits
    candidates: int  # that top_k and top_p choose from
    top: int | None  # most likely tokens to report the logprobs of; None is no logprobs


@dataclass(frozen=True, slots=True)
class Step:
    """A launch of a round; a sampler's has a status."""

    launch: Launch
    status: Array | None = None  # int64 [B], on the host
    row: int = VERIFIER  # of the drafted token


class Launches:
    """The buffers and launches of one sequence's rounds."""

    def __init__(self, device: Device, sessions: dict[str, Session], samplers: dict[str, Engine], most: int):
        """`most` is the largest number of tokens to draft."""
        self.device = device
        self.sessions = sessions
        self.samplers = samplers
        self.vocab_rows = sessions["target"].vocab_rows
        self.most = most
        rows = most + 1
        one, many = ((1,), "int64"), ((1, rows), "int64")
        self._in = Arena(
            device,
            {
                "draft_ids": ((1, 2), "int64"),
                "input_ids": many,
                "given": many,
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
        self.out = Arena(
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
        self._draft_logits = []
        if "draft" in sessions:
            width = sessions["draft"].vocab_rows
            self._draft_logits = [device.zeros((1, 2 if row == 0 else 1, width), "float32", what) for row in range(most)]
        self._target_logits = device.zeros((1, rows, self.vocab_rows), "float32", what)
        self._q = device.zeros((rows, 1, self.vocab_rows), "float32", what)
        limits = [engine.most_candidates for engine in samplers.values() if engine.most_candidates]
        self.most_candidates = min([self.vocab_rows, *limits])
        self._tables: dict[int, Arena] = {}  # by their number of edits
        self._sent: tuple[object, bool] = (None, False)  # the request's table that the device has, and for which rule
        self._lead = 2  # of the last round that drafted
        self._logprobs: dict[int, Arena] = {}
        self._launches: dict[tuple[Any, ...], Launch] = {}
        self._slots: dict[tuple[str, int], tuple[Buffer, list[Launch]]] = {}
        self._plans: dict[Shape, list[Step]] = {}

    def shape(self, tokens: list[int], request: Request, count: int, rows: int, given: bool) -> Shape:
        """What the round after the confirmed `tokens` is, that drafts `count` and runs `rows` rows of the target.

        Raises:
            EngineError: the rows do not fit the cache.
        """
        at = len(tokens) - 1
        top = request.params.logprobs
        return Shape(
            min(2, len(tokens)) if count and not given else 2,
            count,
            given,
            rows,
            self.sessions["target"].window(rows, at, at),
            request.greedy,
            0 if request.greedy else self._send_table(request, given),
            0 if request.greedy else self._candidates(request.candidates),
            None if top is None else max(top, 1),
        )

    def _candidates(self, wanted: int) -> int:
        """The number to begin with: few different ones, because each has launches of its own."""
        enough = (size for size in (1, *CANDIDATES) if size >= wanted)
        return min(next(enough, self.vocab_rows), self.most_candidates)

    def _send_table(self, request: Request, given: bool) -> int:
        """Bring the request's settings and edits to the device, where it has others. Returns how many edits that are.

        Given tokens were drawn from nothing. Accepting one where the target's own draw is the same keeps the target's
        distribution, and does so as often as it can be done: with the target's probability of it.
        """
        edit_ids, edits = table = request.table()
        size = 1
        while size < edit_ids.shape[1]:
            size *= 4  # few different sizes, for the same reason
        size = min(size, self.vocab_rows)
        exact = given or request.exact
        if self._sent[0] is table and self._sent[1] == exact:
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
        arena.host["settings"][:, SETTINGS.index("exact_match")] = exact
        for name, values in (("edit_ids", edit_ids), ("edits", edits)):
            arena.host[name][:, :count] = values
            arena.host[name][:, count:] = values[:, :1]  # entries of one token must be equal
        arena.upload()
        self._sent = table, exact
        return size

    def fill(self, tokens: list[int], request: Request, shape: Shape, given: list[int]) -> None:
        """Write down what the round is to read from the host; `given` are the drafted tokens, where the host has them."""
        host = self._in.host
        self._lead = shape.lead
        at = len(tokens) - 1
        host["input_ids"].reshape(-1)[: shape.rows] = tokens[-1]
        host["positions"][0] = at
        host["drafted_count"][0] = shape.drafted
        if shape.given:
            host["input_ids"].reshape(-1)[1 : 1 + shape.drafted] = given
            host["given"].reshape(-1)[: shape.drafted] = given
        uniforms = request.uniforms(request.emitted, shape.rows)
        host["verifying"].reshape(-1)[: 3 * shape.rows] = uniforms[:, ACCEPTING.start : DRAWING.stop].reshape(-1)
        if shape.drafted and not shape.given:
            # A target with more padding rows than the draft could emit a token that the draft's embedding lacks; it is
            # fed the nearest it has, and what it makes of that costs acceptance and nothing else.
            last = self.sessions["draft"].vocab_rows - 1
            host["draft_ids"].reshape(-1)[: shape.lead] = [min(token, last) for token in tokens[-shape.lead :]]
            drawing = DRAWING if request.exact else DRAFTING
            for row in range(shape.drafted):
                host[f"draft_position {row}"][0] = at + row if row else at + 1 - shape.lead
                host[f"drafting {row}"][...] = uniforms[row, drawing]

    def steps(self, shape: Shape) -> list[Step]:
        """The launches of a round, in order; steps of the same number mean the same in rounds that differ in candidates."""
        if shape not in self._plans:
            steps = [Step(self._in.upload)]
            for row in range(0 if shape.given else shape.drafted):
                steps.append(Step(self._draft_step(row, shape)))
                steps.append(Step(self._drafter(row, shape), self.out.host[f"status {row}"], row))
            steps.append(Step(self._target_pass(shape)))
            steps.append(Step(self._verifier(shape), self.out.host["status"]))
            if shape.top is not None:
                steps.append(Step(self._logprobs_run(shape, shape.top)))
            self._plans[shape] = steps
        return self._plans[shape]

    def _kept(self, name: tuple[Any, ...], make: Callable[[], Launch]) -> Launch:
        """The launch of that name, made when it is first asked for."""
        if name not in self._launches:
            self._launches[name] = make()
        return self._launches[name]

    def _draft_step(self, row: int, shape: Shape) -> Launch:
        lead = shape.lead if row == 0 else 1

        def make() -> Launch:
            ids = self._in.device["draft_ids"].part(0, 1, lead) if row == 0 else self._token(row - 1)[0]
            logits = self._draft_logits[row].part(0, 1, lead, self._draft_logits[row].shape[2])
            return self.sessions["draft"].bind(ids, self._in.device[f"draft_position {row}"], logits, shape.window)

        return self._kept(("draft", row, lead, shape.window), make)

    def _token(self, row: int) -> tuple[Buffer, list[Launch]]:
        """Where a drafter's run writes its token, and what brings it from there to the other drafted ones."""
        drafted = self.out.device["drafted"]
        if self.device.synchronous:
            return drafted.part(row, 1, 1), []
        return self._slot("token", drafted, row, 1, 1)  # apart: the drafter reads the drafted ones while it writes this

    def _slot(self, name: str, whole: Buffer, first: int, *shape: int) -> tuple[Buffer, list[Launch]]:
        """A tensor that an engine may write, and what makes it a part of `whole`."""
        if (name, first) not in self._slots:
            own = self.device.zeros(shape, whole.dtype, "the buffers of a round")
            self._slots[name, first] = own, [self.device.copy_columns(_flat(whole), first, _flat(own), 0, _size(own))]
        return self._slots[name, first]

    def _drafter(self, row: int, shape: Shape) -> Launch:
        lead = shape.lead if row == 0 else 1

        def make() -> Launch:
            whole, width = self._draft_logits[row], self._draft_logits[row].shape[2]
            logits, before = whole.part((lead - 1) * width, 1, 1, width), []
            if logits.address % self.device.alignment:
                logits = self.device.zeros((1, 1, width), "float32", "the buffers of a round")
                before = [self.device.copy_columns(_flat(logits), 0, _flat(whole), (lead - 1) * width, width)]
            token, after = self._token(row)
            tensors = {"logits": logits, "token": token, "status": self.out.device[f"status {row}"]}
            if shape.greedy:
                return _sequence([*before, self.samplers["greedy_drafter"].bind(tensors), *after])
            q, keep = self._q.part(row * self.vocab_rows, 1, self.vocab_rows), list[Launch]()
            if q.address % self.device.alignment:
                q, keep = self._slot("q", self._q, row * self.vocab_rows, 1, self.vocab_rows)
            tensors |= {
                "drafted": self.out.device["drafted"],
                "first_row": self._in.device[f"first_row {row}"],
                "uniforms": self._in.device[f"drafting {row}"],
                "q": q,
            }
            return _sequence([*before, self._sampler("drafter", tensors, shape), *after, *keep])

        return self._kept(("drafter", row, lead, shape.greedy, shape.edits, shape.candidates), make)

    def _target_pass(self, shape: Shape) -> Launch:
        def make() -> Launch:
            ids = self._in.device["input_ids"].part(0, 1, shape.rows)
            logits = self._target_logits.part(0, 1, shape.rows, self.vocab_rows)
            launches = [self.sessions["target"].bind(ids, self._in.device["positions"], logits, shape.window)]
            if shape.drafted and not shape.given:
                drafted = self.out.device["drafted"]
                launches.insert(0, self.device.copy_columns(ids, 1, drafted, 0, shape.drafted))
            return _sequence(launches)

        return self._kept(("target", shape.drafted, shape.given, shape.rows, shape.window), make)

    def _verifier(self, shape: Shape) -> Launch:
        rows = shape.rows

        def make() -> Launch:
            tensors = {
                "logits": self._target_logits.part(0, 1, rows, self.vocab_rows),
                "drafted": (self._in if shape.given else self.out)
                .device["given" if shape.given else "drafted"]
                .part(0, 1, rows),
                "drafted_count": self._in.device["drafted_count"],
                "accepted": self.out.device["accepted"],
                "tokens": self.out.device["tokens"].part(0, 1, rows),
                "status": self.out.device["status"],
            }
            if shape.greedy:
                return self.samplers["greedy_verifier"].bind(tensors)
            tensors |= {
                "q": self._q.part(0, rows, 1, self.vocab_rows),
                "uniforms": self._in.device["verifying"].part(0, 1, rows, 3),
            }
            return self._sampler("verifier", tensors, shape)

        return self._kept(("verifier", rows, shape.given, shape.greedy, shape.edits, shape.candidates), make)

    def shorten(self, shape: Shape, drafted: int, rows: int) -> Shape:
        """The same round with fewer drafted tokens, where it is under way on a CPU, whose buffers are the host's."""
        self._in.host["drafted_count"][0] = drafted
        return shape._replace(drafted=drafted, rows=rows)

    def confidence(self, row: int, greedy: bool) -> float:
        """Of the round under way, on a CPU: the draft's probability of the likeliest token after so many drafted ones."""
        if not greedy:
            return float(self._q.view()[row].max())
        logits = self.draft_logits(row)
        return float(1 / np.exp(logits - logits.max()).sum())

    def _sampler(self, name: str, tensors: dict[str, Buffer], shape: Shape) -> Launch:
        """A run of a sampler over these tensors and the table."""
        candidates = host_buffer(np.array([shape.candidates], dtype=np.int64))
        return self.samplers[name].bind(tensors | self._tables[shape.edits].device | {"candidates": candidates})

    def _logprobs_run(self, shape: Shape, top: int) -> Launch:
        most, rows = self.most + 1, shape.rows

        def make() -> Launch:
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
                "tokens": self.out.device["tokens"].part(0, 1, rows),
                "candidates": host_buffer(np.array([top], dtype=np.int64)),
                "logprobs": arena.device["logprobs"].part(0, 1, rows),
                "top_ids": arena.device["top_ids"].part(0, 1, rows, top),
                "top_logprobs": arena.device["top_logprobs"].part(0, 1, rows, top),
            }
            return _sequence([self.samplers["logprobs"].bind(tensors), arena.download])

        return self._kept(("logprobs", rows, top), make)

    def logprobs(self, count: int, top: int) -> list[Logprobs]:
        host = {name: values.reshape(-1) for name, values in self._logprobs[max(top, 1)].host.items()}
        width = max(top, 1)
        found = []
        for row in range(count):
            best = slice(row * width, row * width + top)
            pairs = zip(host["top_ids"][best].tolist(), host["top_logprobs"][best].tolist(), strict=True)
            found.append(Logprobs(float(host["logprobs"][row]), tuple(pairs)))
        return found

    def drafted(self, shape: Shape) -> list[int]:
        """Of the last round: the drafted tokens, and what lies behind them."""
        buffer = self._in.device["given"] if shape.given else self.out.device["drafted"]
        tokens: list[int] = self.device.read(buffer)[0].tolist()
        return tokens

    def draft_logits(self, row: int) -> Floats:
        """Of the last round: what the drafted token of that number was drawn from, [Vd]."""
        logits: Floats = self.device.read(self._draft_logits[row])
        return np.asarray(logits[0, self._lead - 1 if row == 0 else 0])

    def q(self, count: int) -> Floats:
        """Of the last round: what the drafter claims to have drawn so many tokens from, [count, V]."""
        return np.asarray(self.device.read(self._q)[:count, 0])

    def target_logits(self, rows: int) -> Floats:
        """Of the last round: [S, V]."""
        return self.device.read(self._target_logits.part(0, rows, self.vocab_rows))

    def put_drafted(self, row: int, token: int, q: Floats) -> None:
        """What the drafter would have written, decided elsewhere."""
        self.device.write(self._q.part(row * self.vocab_rows, 1, self.vocab_rows), q)
        self.device.write(self.out.device["drafted"].part(row, 1, 1), np.array(token))
        self.device.write(self._token(row)[0], np.array(token))
        self.device.write(self.out.device[f"status {row}"], np.array(FINE))

    def put_verdict(self, rows: int, tokens: list[int]) -> None:
        """What the verifier would have written, decided elsewhere."""
        padded = np.array([tokens + [-1] * (rows - len(tokens))])
        self.device.write(self.out.device["tokens"].part(0, 1, rows), padded)
        self.device.write(self.out.device["accepted"], np.array(len(tokens) - 1))
        self.device.write(self.out.device["status"], np.array(FINE))


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
