"""The buffers of a round, each at an address that never changes, and the launches over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from outrider.engines.contract import CANDIDATES, DECIDED, EDITS, SETTINGS
from outrider.engines.device import Arena, Buffer, Device, Engine, Launch, host_buffer, kept
from outrider.engines.session import Floats, Session
from outrider.runtime.drafter import top_probability
from outrider.runtime.request import ACCEPTING, DRAFTING, DRAWING, Logprobs, Request

VERIFIER = -1
MAX_KEPT = 512  # launches, and plans of them; each holds bindings of an engine
Array = npt.NDArray[Any]

# Of a slot that takes no part: greedy, and an edit that changes nothing.
NO_EDITS = np.zeros((1, 1), dtype=np.int64), np.zeros((1, 1, len(EDITS)), dtype=np.float32)
NO_SETTINGS = np.array([1.0 if name in ("top_p", "repetition_penalty") else 0.0 for name in SETTINGS], dtype=np.float32)


class Turn(NamedTuple):
    """One sequence's part in a round."""

    tokens: list[int]  # the confirmed ones
    request: Request
    k: int  # tokens to draft
    given: list[int]  # these, where the draft is not asked for them


class Idle(NamedTuple):
    """A slot that takes no part, between others that do: where its caches may be written."""

    target: int
    draft: int


class Shape(NamedTuple):
    """What makes two rounds the same launches."""

    first: int  # slot
    batch: int  # slots, from that one on
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
    """The buffers and launches of the rounds of up to as many sequences as the sessions have slots.

    A round of N slots has its tensors [N, ...] at the beginning of each buffer, without gaps.
    """

    def __init__(self, device: Device, sessions: dict[str, Session], samplers: dict[str, Engine], most: int):
        """`most` is the largest number of tokens to draft."""
        self.device = device
        self.sessions = sessions
        self.samplers = samplers
        self.vocab_rows = sessions["target"].vocab_rows
        self.most = most
        self.batch = sessions["target"].batch
        batch, rows = self.batch, most + 1
        one, many = ((batch,), "int64"), ((batch * rows,), "int64")
        self._in = Arena(
            device,
            {
                "draft_ids": ((batch * 2,), "int64"),
                "input_ids": many,
                "given": many,
                "positions": one,
                "drafted_count": one,
                "verifying": ((batch * rows * 3,), "float32"),
                **{f"draft_position {row}": one for row in range(most)},
                **{f"first_row {row}": ((1,), "int64") for row in range(most)},
                **{f"drafting {row}": ((batch, 2), "float32") for row in range(most)},
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
            self._scratch = np.empty(width, dtype=np.float32)
            self._draft_logits = [device.zeros((batch * (2 if row == 0 else 1), width), "float32", what) for row in range(most)]
        self._target_logits = device.zeros((batch * rows, self.vocab_rows), "float32", what)
        self._q = device.zeros((rows * batch, self.vocab_rows), "float32", what)
        limits = [engine.max_candidates for engine in samplers.values() if engine.max_candidates]
        self.max_candidates = min([self.vocab_rows, *limits])
        self._tables: dict[int, Arena] = {}  # by their number of edits
        self._sent: list[tuple[object, bool]] = []  # the requests' tables that the device has, and for which rule
        self._logprobs: dict[int, Arena] = {}
        self._launches: dict[tuple[Any, ...], Launch] = {}
        self._slots: dict[tuple[str, int, int], tuple[Buffer, list[Launch]]] = {}
        self._plans: dict[Shape, list[Step]] = {}

    def shape(self, turns: Sequence[Turn | Idle], first: int, count: int, rows: int, given: bool) -> Shape:
        """What the round of the slots from `first` on is, that drafts `count` tokens and runs `rows` rows of the target.

        Raises:
            EngineError: the rows do not fit the cache.
        """
        active = [turn for turn in turns if isinstance(turn, Turn)]
        places = [turn.target if isinstance(turn, Idle) else len(turn.tokens) - 1 for turn in turns]
        requests = [turn.request for turn in active]
        greedy = all(request.greedy for request in requests)
        tops = [max(top, 1) for request in requests if (top := request.params.logprobs) is not None]
        return Shape(
            first,
            len(turns),
            min(2, len(active[0].tokens)) if len(turns) == 1 and count and not given else 2,
            count,
            given,
            rows,
            self.sessions["target"].window(rows, min(places), max(places)),
            greedy,
            0 if greedy else self._send_tables(turns, given),
            0 if greedy else self._candidates(max(request.candidates for request in requests)),
            max(tops, default=None),
        )

    def _candidates(self, wanted: int) -> int:
        """The number to begin with: few different ones, because each has launches of its own."""
        enough = (size for size in (1, *CANDIDATES) if size >= wanted)
        return min(next(enough, self.vocab_rows), self.max_candidates)

    def _send_tables(self, turns: Sequence[Turn | Idle], given: bool) -> int:
        """Bring the requests' settings and edits to the device, where it has others. Returns how many edits that are.

        Given tokens were drawn from nothing. Accepting one where the target's own draw is the same keeps the target's
        distribution, and does so as often as it can be done: with the target's probability of it.
        """
        tables = [turn.request.table() if isinstance(turn, Turn) else NO_EDITS for turn in turns]
        rules = [isinstance(turn, Turn) and (given or turn.request.exact) for turn in turns]
        most, size = max(edit_ids.shape[1] for edit_ids, _ in tables), 1
        while size < most:
            size *= 4  # few different sizes, for the same reason
        size = min(size, self.vocab_rows)
        wanted: list[tuple[object, bool]] = [*zip(tables, rules, strict=True)]
        if len(wanted) == len(self._sent) and all(
            table is sent and rule == before for (table, rule), (sent, before) in zip(wanted, self._sent, strict=True)
        ):
            return size
        if size not in self._tables:
            layout = {
                "settings": ((self.batch, len(SETTINGS)), "float32"),
                "edit_ids": ((self.batch, size), "int64"),
                "edits": ((self.batch, size, len(EDITS)), "float32"),
            }
            self._tables[size] = Arena(self.device, layout)
        host = self._tables[size].host
        for row, turn in enumerate(turns):
            edit_ids, edits = tables[row]
            count = edit_ids.shape[1]
            host["settings"][row] = turn.request.settings[0] if isinstance(turn, Turn) else NO_SETTINGS
            host["settings"][row, SETTINGS.index("exact_match")] = rules[row]
            for name, values in (("edit_ids", edit_ids), ("edits", edits)):
                host[name][row, :count] = values[0]
                host[name][row, count:] = values[0, :1]  # entries of one token must be equal
        self._tables[size].upload()
        self._sent = wanted
        return size

    def fill(self, turns: Sequence[Turn | Idle], shape: Shape) -> None:
        """Write down what the round is to read from the host."""
        host, rows = self._in.host, shape.rows
        ids = host["input_ids"][: shape.batch * rows].reshape(shape.batch, rows)
        given = host["given"][: shape.batch * rows].reshape(shape.batch, rows)
        verifying = host["verifying"][: shape.batch * rows * 3].reshape(shape.batch, rows, 3)
        draft_ids = host["draft_ids"][: shape.batch * shape.lead].reshape(shape.batch, shape.lead)
        for row, turn in enumerate(turns):
            if isinstance(turn, Idle):
                ids[row], host["positions"][row], host["drafted_count"][row] = 0, turn.target, 0
                draft_ids[row] = 0
                for step in range(shape.drafted):
                    host[f"draft_position {step}"][row] = turn.draft if step == 0 else turn.draft + 1 + step
                continue
            tokens, request = turn.tokens, turn.request
            at = len(tokens) - 1
            ids[row], host["positions"][row], host["drafted_count"][row] = tokens[-1], at, turn.k
            if shape.given:
                ids[row, 1 : 1 + turn.k] = given[row, : turn.k] = turn.given
            verifying[row] = request.uniforms(request.emitted, rows)[:, ACCEPTING.start : DRAWING.stop]
            if shape.drafted and not shape.given:
                # A target with more padding rows than the draft could emit a token that the draft's embedding lacks; it is
                # fed the nearest it has, and what it makes of that costs acceptance and nothing else.
                last = self.sessions["draft"].vocab_rows - 1
                draft_ids[row] = [min(token, last) for token in tokens[-shape.lead :]]
                uniforms = request.uniforms(request.emitted, shape.drafted)
                drawing = DRAWING if request.exact else DRAFTING
                begin = max(at + 1 - shape.lead, 0)  # a text of one token in company, which drafts nothing
                for step in range(shape.drafted):
                    host[f"draft_position {step}"][row] = begin if step == 0 else begin + shape.lead - 1 + step
                    host[f"drafting {step}"][row] = uniforms[step, drawing]

    def steps(self, shape: Shape) -> list[Step]:
        """The launches of a round, in order; steps of the same number mean the same in rounds that differ in candidates."""

        def make() -> list[Step]:
            steps = [Step(self._in.upload)]
            for row in range(0 if shape.given else shape.drafted):
                steps.append(Step(self._draft_step(row, shape)))
                steps.append(Step(self._drafter(row, shape), self.out.host[f"status {row}"], row))
            steps.append(Step(self._target_pass(shape)))
            steps.append(Step(self._verifier(shape), self.out.host["status"]))
            if shape.top is not None:
                steps.append(Step(self._logprobs_run(shape, shape.top)))
            return steps

        return kept(self._plans, shape, MAX_KEPT, make)

    def _kept(self, name: tuple[Any, ...], make: Callable[[], Launch]) -> Launch:
        """The launch of that name, made when it is first asked for."""
        return kept(self._launches, name, MAX_KEPT, make)

    def _draft_step(self, row: int, shape: Shape) -> Launch:
        lead = shape.lead if row == 0 else 1

        def make() -> Launch:
            ids = self._in.device["draft_ids"].part(0, shape.batch, lead) if row == 0 else self._token(row - 1, shape)[0]
            positions = self._in.device[f"draft_position {row}"].part(0, shape.batch)
            rows = 1 if self._last_alone else lead
            logits = self._draft_logits[row].part(0, shape.batch, rows, self.sessions["draft"].vocab_rows)
            return self.sessions["draft"].bind(ids, positions, logits, shape.window, shape.first)

        return self._kept(("draft", row, lead, shape.window, shape.first, shape.batch), make)

    @property
    def _last_alone(self) -> bool:
        """Whether the draft gives the logits of the last row alone."""
        return self.sessions["draft"].engine.skips_logits

    def _token(self, row: int, shape: Shape) -> tuple[Buffer, list[Launch]]:
        """Where a drafter's run writes its tokens, and what brings them from there to the other drafted ones."""
        return self._column("token", self._drafted(shape), row, shape.batch, 1)

    def _drafted(self, shape: Shape) -> Buffer:
        """The drafted tokens, the one of step i in column i."""
        return self.out.device["drafted"].part(0, shape.batch, self.most + 1)

    def _column(self, name: str, whole: Buffer, first: int, rows: int, columns: int) -> tuple[Buffer, list[Launch]]:
        """A tensor that an engine may write, and what makes it columns of the matrix `whole`, from `first` on."""
        if (name, first, rows) not in self._slots:
            own = self.device.zeros((rows, columns), whole.dtype, "the buffers of a round")
            self._slots[name, first, rows] = own, [self.device.copy_columns(whole, first, own, 0, columns)]
        return self._slots[name, first, rows]

    def _draft_row(self, row: int, shape: Shape) -> tuple[Buffer, list[Launch]]:
        """The logits [N, 1, Vd] that a drafter's run reads, and what brings them there."""
        lead = shape.lead if row == 0 and not self._last_alone else 1
        whole, width = self._draft_logits[row], self.sessions["draft"].vocab_rows
        if lead == 1:
            return whole.part(0, shape.batch, 1, width), []
        logits = whole.part((lead - 1) * width, shape.batch, 1, width)
        if shape.batch == 1 and logits.address % self.device.alignment == 0:
            return logits, []
        if ("logits", row, shape.batch) not in self._slots:
            own = self.device.zeros((shape.batch, 1, width), "float32", "the buffers of a round")
            matrix = whole.part(0, shape.batch, lead * width)
            copy = self.device.copy_columns(own.part(0, shape.batch, width), 0, matrix, (lead - 1) * width, width)
            self._slots["logits", row, shape.batch] = own, [copy]
        return self._slots["logits", row, shape.batch]

    def _drafter(self, row: int, shape: Shape) -> Launch:
        lead = shape.lead if row == 0 else 1

        def make() -> Launch:
            logits, before = self._draft_row(row, shape)
            token, after = self._token(row, shape)
            tensors = {"logits": logits, "token": token, "status": self.out.device[f"status {row}"].part(0, shape.batch)}
            if shape.greedy:
                return _sequence([*before, self.samplers["greedy_drafter"].bind(tensors), *after])
            first, keep = row * shape.batch * self.vocab_rows, list[Launch]()
            q = self._q.part(first, shape.batch, self.vocab_rows)
            if q.address % self.device.alignment:
                whole = self._q.part(0, 1, self._q.nbytes // self._q.itemsize)
                flat, keep = self._column("q", whole, first, 1, shape.batch * self.vocab_rows)
                q = flat.part(0, shape.batch, self.vocab_rows)
            tensors |= {
                "drafted": self._drafted(shape),
                "first_row": self._in.device[f"first_row {row}"],
                "uniforms": self._in.device[f"drafting {row}"].part(0, shape.batch, 2),
                "q": q,
            }
            return _sequence([*before, self._sampler("drafter", tensors, shape), *after, *keep])

        return self._kept(("drafter", row, lead, shape.batch, shape.greedy, shape.edits, shape.candidates), make)

    def _target_pass(self, shape: Shape) -> Launch:
        def make() -> Launch:
            ids = self._in.device["input_ids"].part(0, shape.batch, shape.rows)
            positions = self._in.device["positions"].part(0, shape.batch)
            logits = self._target_logits.part(0, shape.batch, shape.rows, self.vocab_rows)
            launches = [self.sessions["target"].bind(ids, positions, logits, shape.window, shape.first)]
            if shape.drafted and not shape.given:
                launches.insert(0, self.device.copy_columns(ids, 1, self._drafted(shape), 0, shape.drafted))
            return _sequence(launches)

        return self._kept(("target", shape.drafted, shape.given, shape.rows, shape.window, shape.first, shape.batch), make)

    def _verifier(self, shape: Shape) -> Launch:
        batch, rows = shape.batch, shape.rows

        def make() -> Launch:
            drafted, before = self._drafted(shape), list[Launch]()
            if shape.given:
                drafted = self._in.device["given"].part(0, batch, rows)
            elif batch == 1:
                drafted = drafted.part(0, 1, rows)
            elif rows <= self.most:
                narrow = self.device.zeros((batch, rows), "int64", "the buffers of a round")
                before = [self.device.copy_columns(narrow, 0, drafted, 0, rows)]
                drafted = narrow
            tensors = {
                "logits": self._target_logits.part(0, batch, rows, self.vocab_rows),
                "drafted": drafted,
                "drafted_count": self._in.device["drafted_count"].part(0, batch),
                "accepted": self.out.device["accepted"].part(0, batch),
                "tokens": self.out.device["tokens"].part(0, batch, rows),
                "status": self.out.device["status"].part(0, batch),
            }
            if shape.greedy:
                return _sequence([*before, self.samplers["greedy_verifier"].bind(tensors)])
            tensors |= {
                "q": self._q.part(0, rows, batch, self.vocab_rows),
                "uniforms": self._in.device["verifying"].part(0, batch, rows, 3),
            }
            return _sequence([*before, self._sampler("verifier", tensors, shape)])

        return self._kept(("verifier", rows, batch, shape.given, shape.greedy, shape.edits, shape.candidates), make)

    def shorten(self, shape: Shape, drafted: int, rows: int) -> Shape:
        """The same round of one sequence with fewer drafted tokens, where it is under way on a CPU, whose buffers are the
        host's."""
        self._in.host["drafted_count"][0] = drafted
        return shape._replace(drafted=drafted, rows=rows)

    def confidence(self, row: int, shape: Shape) -> float:
        """Of the round of one sequence under way, on a CPU: the draft's probability of the likeliest token after so many
        drafted ones."""
        if not shape.greedy:
            return float(self._q.view()[row].max())
        return top_probability(self.draft_logits(row, shape, 0), self._scratch)

    def _sampler(self, name: str, tensors: dict[str, Buffer], shape: Shape) -> Launch:
        """A run of a sampler over these tensors and the table."""
        table = self._tables[shape.edits].device
        tables = {
            "settings": table["settings"].part(0, shape.batch, len(SETTINGS)),
            "edit_ids": table["edit_ids"].part(0, shape.batch, shape.edits),
            "edits": table["edits"].part(0, shape.batch, shape.edits, len(EDITS)),
        }
        candidates = host_buffer(np.array([shape.candidates], dtype=np.int64))
        return self.samplers[name].bind(tensors | tables | {"candidates": candidates})

    def _logprobs_run(self, shape: Shape, top: int) -> Launch:
        batch, most, rows = shape.batch, self.most + 1, shape.rows

        def make() -> Launch:
            if top not in self._logprobs:
                layout = {
                    "logprobs": ((self.batch * most,), "float32"),
                    "top_ids": ((self.batch * most * top,), "int64"),
                    "top_logprobs": ((self.batch * most * top,), "float32"),
                }
                self._logprobs[top] = Arena(self.device, layout)
            arena = self._logprobs[top]
            tensors = {
                "logits": self._target_logits.part(0, batch, rows, self.vocab_rows),
                "tokens": self.out.device["tokens"].part(0, batch, rows),
                "candidates": host_buffer(np.array([top], dtype=np.int64)),
                "logprobs": arena.device["logprobs"].part(0, batch, rows),
                "top_ids": arena.device["top_ids"].part(0, batch, rows, top),
                "top_logprobs": arena.device["top_logprobs"].part(0, batch, rows, top),
            }
            return _sequence([self.samplers["logprobs"].bind(tensors), arena.download])

        return self._kept(("logprobs", batch, rows, top), make)

    def emitted(self, shape: Shape, lane: int) -> list[int]:
        """Of the last round: the accepted tokens of the sequence of that number, and the target's own."""
        begin = lane * shape.rows
        tokens: list[int] = self.out.host["tokens"][begin : begin + int(self.out.host["accepted"][lane]) + 1].tolist()
        return tokens

    def logprobs(self, shape: Shape, lane: int, count: int, top: int) -> list[Logprobs]:
        """Of the last round, of the sequence of that number: those of its first `count` tokens."""
        assert shape.top is not None
        host, found = self._logprobs[shape.top].host, []
        for row in range(lane * shape.rows, lane * shape.rows + count):
            best = slice(row * shape.top, row * shape.top + top)
            pairs = zip(host["top_ids"][best].tolist(), host["top_logprobs"][best].tolist(), strict=True)
            found.append(Logprobs(float(host["logprobs"][row]), tuple(pairs)))
        return found

    def drafted(self, shape: Shape, lane: int) -> list[int]:
        """Of the last round: the drafted tokens of a sequence, and what lies behind them."""
        buffer = self._in.device["given"].part(0, shape.batch, shape.rows) if shape.given else self._drafted(shape)
        tokens: list[int] = self.device.read(buffer)[lane].tolist()
        return tokens

    def draft_logits(self, row: int, shape: Shape, lane: int) -> Floats:
        """Of the last round: what the drafted token of that number was drawn from, [Vd]."""
        logits: Floats = self.device.read(self._draft_row(row, shape)[0])[lane, 0]
        return logits

    def q(self, count: int, shape: Shape, lane: int) -> Floats:
        """Of the last round: what the drafter claims to have drawn so many tokens from, [count, V]."""
        q: Floats = self.device.read(self._q.part(0, count, shape.batch, self.vocab_rows))[:, lane]
        return q

    def target_logits(self, shape: Shape, lane: int) -> Floats:
        """Of the last round: [S, V]."""
        first = lane * shape.rows * self.vocab_rows
        return self.device.read(self._target_logits.part(first, shape.rows, self.vocab_rows))

    def put_drafted(self, row: int, shape: Shape, lane: int, token: int, q: Floats | None = None) -> None:
        """What the drafter would have written of a sequence, decided elsewhere."""
        if q is not None:
            first = (row * shape.batch + lane) * self.vocab_rows
            self.device.write(self._q.part(first, 1, self.vocab_rows), q)
        self.device.write(self.out.device["drafted"].part(lane * (self.most + 1) + row, 1, 1), np.array(token))
        self.device.write(self._token(row, shape)[0].part(lane, 1, 1), np.array(token))
        self.device.write(self.out.device[f"status {row}"].part(lane, 1), np.array(DECIDED))

    def put_verdict(self, shape: Shape, lane: int, tokens: list[int]) -> None:
        """What the verifier would have written of a sequence, decided elsewhere."""
        padded = np.array([tokens + [-1] * (shape.rows - len(tokens))])
        self.device.write(self.out.device["tokens"].part(lane * shape.rows, 1, shape.rows), padded)
        self.device.write(self.out.device["accepted"].part(lane, 1), np.array(len(tokens) - 1))
        self.device.write(self.out.device["status"].part(lane, 1), np.array(DECIDED))


def _sequence(launches: list[Launch]) -> Launch:
    """Several launches as one."""
    if len(launches) == 1:
        return launches[0]

    def launch() -> None:
        for each in launches:
            each()

    return launch
