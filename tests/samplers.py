"""What the tests of the sampler graphs share: sessions of them, calls that run them, and random rounds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from outrider.backends.onnxruntime.engine import OnnxRuntimeEngine
from outrider.engines.device import Cpu, Engine, host_buffer
from outrider.engines.samplers import DECIDED, EDITS, SETTINGS, sampler_tensors
from outrider.export.graph.sampler import sampler
from outrider.runtime.rounds.reference import Edit, named_settings, verify, warp

Array = npt.NDArray[Any]
Graphs = Callable[[str, int], Engine]
NEUTRAL = {name: 1.0 if name in ("temperature", "top_p", "repetition_penalty") else 0.0 for name in SETTINGS}
UNEDITED = (np.zeros((1, 1), dtype=np.int64), np.zeros((1, 1, len(EDITS)), dtype=np.float32))
RULES = pytest.mark.parametrize("exact_match", [0, 1])  # by which a drafted token is accepted


def sampler_graphs(folder: Path) -> Graphs:
    """Each sampler by its name and width, made once."""

    @functools.cache
    def made(name: str, vocab_rows: int) -> Engine:
        path: Path = folder / f"{name}-{vocab_rows}.onnx"
        ir.save(sampler(name, vocab_rows), path)
        inputs, outputs = sampler_tensors(name, vocab_rows)
        return OnnxRuntimeEngine(path, [*inputs, *outputs], Cpu())

    return made


def row(**values: float) -> Array:
    """One sequence's settings, float32 [8]."""
    return np.array(list((NEUTRAL | values).values()), dtype=np.float32)


def run(graphs: Graphs, name: str, vocab_rows: int, **inputs: Array) -> tuple[Array, ...]:
    """The outputs of a sampler, in order."""
    sizes = {
        "batch": inputs["logits"].shape[0],
        "rows": inputs["logits"].shape[1],
        "top": int(inputs.get("candidates", [0])[0]),
    }
    wanted, given = sampler_tensors(name, vocab_rows)
    outputs = {
        each.name: np.zeros([size if isinstance(size, int) else sizes[size] for size in each.shape], np.dtype(each.dtype))
        for each in given
    }
    ready = {each.name: np.ascontiguousarray(inputs[each.name], dtype=each.dtype) for each in wanted}
    graphs(name, vocab_rows).bind({name: host_buffer(array) for name, array in (ready | outputs).items()})()
    return tuple(outputs.values())


class Case:
    """A random round of a random batch: everything that the verifier is given."""

    def __init__(self, seed: int, vocab_rows: int | None = None):
        random = self.random = np.random.default_rng(seed)
        self.vocab_rows = vocab_rows or int(random.choice([2, 5, 64, 255, 256, 257, 700]))
        self.batch, self.rows = int(random.integers(1, 4)), int(random.integers(1, 10))
        shape = (self.batch, self.rows, self.vocab_rows)
        self.logits = (random.standard_normal(shape) * random.choice([0.1, 1, 5, 20])).astype(np.float32)
        if random.random() < 0.3:
            self.logits = self.logits.round()  # ties
        pick = random.choice
        self.settings = np.stack(
            [
                row(
                    temperature=pick([0, 1e-3, 0.3, 0.7, 1, 2.5]),
                    top_k=min(pick([0, 0, 1, 3, 40]), self.vocab_rows),
                    top_p=pick([1e-6, 0.1, 0.5, 0.9, 0.999, 1, 1]),
                    min_p=pick([0, 0, 0.05, 0.5, 1]),
                    repetition_penalty=pick([1, 1.3, 0.8]),
                    presence_penalty=pick([0, 0.7, -2]),
                    frequency_penalty=pick([0, 0.4, -1]),
                    exact_match=pick([0, 0, 1]),
                )
                for _ in range(self.batch)
            ]
        )
        self.drafted_count = random.integers(0, self.rows, self.batch)
        self._table()
        self._draft()
        self.uniforms = random.random((self.batch, self.rows, 3), dtype=np.float32)

    def _table(self) -> None:
        """Edits of up to 6 tokens; a shorter table repeats its last entry."""
        self.edits_of: list[dict[int, Edit]] = []
        self.edit_ids = np.zeros((self.batch, 6), dtype=np.int64)
        self.edits = np.zeros((self.batch, 6, len(EDITS)), dtype=np.float32)
        for sequence in range(self.batch):
            tokens = self.random.choice(self.vocab_rows, min(6, self.vocab_rows), replace=False).tolist()
            known = {
                token: Edit(
                    bias=float(np.float32(self.random.choice([0, 0, 2.5, -100]))),
                    count=int(count := self.random.integers(0, 3)),
                    seen=bool(count or self.random.random() < 0.5),
                    banned_rows=int(self.random.choice([-4, 0, 0, 2])) if index else 0,
                )
                for index, token in enumerate(tokens)
            }
            self.edits_of.append(known)
            entries = list(known.items())
            for index in range(6):
                token, each = entries[min(index, len(entries) - 1)]
                self.edit_ids[sequence, index] = token
                self.edits[sequence, index] = [each.bias, each.count, each.seen, each.banned_rows]

    def _draft(self) -> None:
        """Drafted tokens, each drawn from its q: the target's distribution blurred, or with tokens that it lacks."""
        self.q = np.zeros((self.rows, self.batch, self.vocab_rows), dtype=np.float32)
        self.drafted = np.zeros((self.batch, self.rows), dtype=np.int64)
        for sequence in range(self.batch):
            chosen = named_settings(self.settings[sequence]) | {"temperature": max(self.settings[sequence, 0], 0.3)}
            for at in range(self.rows):
                noise = self.random.standard_normal(self.vocab_rows) * self.random.choice([0, 0.5, 3])
                self.q[at, sequence] = warp(self.logits[sequence, at] + noise, chosen)
                self.drafted[sequence, at] = self.random.choice(
                    self.vocab_rows, p=self.q[at, sequence].astype(np.float64) / self.q[at, sequence].astype(np.float64).sum()
                )

    def verdicts(self, graphs: Graphs) -> list[list[int]]:
        """What the graph emits for each sequence."""
        accepted, tokens, status = run(
            graphs,
            "verifier",
            self.vocab_rows,
            logits=self.logits,
            drafted=self.drafted,
            drafted_count=self.drafted_count,
            q=self.q,
            settings=self.settings,
            edit_ids=self.edit_ids,
            edits=self.edits,
            uniforms=self.uniforms,
            candidates=np.array([self.vocab_rows]),
        )
        assert (status == DECIDED).all()
        for sequence, count in enumerate(accepted):
            assert (tokens[sequence, count + 1 :] == -1).all()
        return [tokens[sequence, : count + 1].tolist() for sequence, count in enumerate(accepted)]

    def reference(self, sequence: int) -> list[int]:
        count = self.drafted_count[sequence]
        return verify(
            self.logits[sequence].astype(np.float64),
            self.drafted[sequence, :count].tolist(),
            self.q[:, sequence].astype(np.float64),
            named_settings(self.settings[sequence]),
            self.uniforms[sequence],
            self.edits_of[sequence],
        )


def one_row(graphs: Graphs, logits: Array, candidates: int = 0, **values: Any) -> tuple[Array, int, int]:
    """Run the drafter on one row of logits [V]; return q, a token and the status."""
    size = len(logits)
    token, q, status = run(
        graphs,
        "draft_sampler",
        size,
        logits=logits[None, None].astype(np.float32),
        drafted=np.zeros((1, 1)),
        first_row=np.zeros(1),
        settings=row(**values)[None],
        edit_ids=UNEDITED[0],
        edits=UNEDITED[1],
        uniforms=np.array([[0.37, 0.62]]),
        candidates=np.array([candidates or size]),
    )
    return q[0], int(token[0, 0]), int(status[0])


def round_of(
    graphs: Graphs, logits: Array, drafted: list[int], q: Array, uniforms: Array, candidates: int = 1, **values: Any
) -> tuple[list[int], int]:
    """Run the verifier on one sequence: logits [S, V], q [k, V], uniforms [S, 3]; return the tokens and the status."""
    rows, size = logits.shape
    accepted, tokens, status = run(
        graphs,
        "verifier",
        size,
        logits=logits[None],
        drafted=np.array([drafted + [0] * (rows - len(drafted))]),
        drafted_count=np.array([len(drafted)]),
        q=np.concatenate([q, np.zeros((rows - len(q), size))])[:, None],
        settings=row(**values)[None],
        edit_ids=UNEDITED[0],
        edits=UNEDITED[1],
        uniforms=uniforms[None],
        candidates=np.array([candidates]),
    )
    return tokens[0, : accepted[0] + 1].tolist(), int(status[0])
