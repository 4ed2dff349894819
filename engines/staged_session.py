"""A session whose model is cut into stages, which run one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy.typing as npt

from outrider.engines.contract import Stage, Tensor
from outrider.engines.device import Buffer, Device, Launch, Layout, in_sequence
from outrider.engines.precisions import PRECISIONS
from outrider.engines.session import Pass, Session
from outrider.engines.sizes import Sizes, check_memory, pass_layout

FEWEST = 2  # rows that some sessions run in place of one: of a pass, and of a sequence in attention


def boundary_layout(tensors: Iterable[Tensor], sizes: Sizes) -> Layout:
    """Return what stages give each other in the largest pass of a session."""
    return pass_layout(tensors, sizes.batch, max(sizes.max_rows, FEWEST))


def crossing_layout(tensors: Iterable[Tensor], count: int, rows: int) -> Layout:
    """Return what stages give each other in a pass of `count` sequences with `rows` rows each."""
    return pass_layout(tensors, count, FEWEST if count * rows < FEWEST else rows)


def boundary_buffers(device: Device, tensors: Iterable[Tensor], sizes: Sizes) -> dict[str, Buffer]:
    """Return memory for what stages give each other, by name, for the largest pass of a session.

    Raises:
        EngineError: the device has too little memory.
    """
    return {name: device.zeros(*each, "what stages pass on") for name, each in boundary_layout(tensors, sizes).items()}


def check_stages(devices: Sequence[Device], stages: Sequence[Stage], precision: str, whole: Sizes) -> None:
    """Check that the caches of all stages on a device, and what they pass on, fit together before one of them is opened.

    Args:
        devices: of the stages.
        precision: key of `PRECISIONS`.
        whole: the sizes of the whole model.

    Raises:
        EngineError: they do not fit.
    """
    own = PRECISIONS[precision].dtype
    for device in _different(devices):
        here = [stage for stage, each in zip(stages, devices, strict=True) if each.stream == device.stream]
        caches = [each for stage in here for each in whole.of(stage).tensors]
        sizes = [((whole.batch, *each.sizes(whole.capacity, whole.recent)), each.dtype or own) for each in caches]
        passed = boundary_layout((tensor for stage in here for tensor in (*stage.takes, *stage.gives)), whole)
        check_memory(device, whole, [*sizes, *passed.values()])


def _different(devices: Iterable[Device]) -> list[Device]:
    """Return one device for each queue of work: all CPUs are the same."""
    return [*{device.stream: device for device in devices}.values()]


class StagedSession(Session):
    """The stages of a model, each a session with the caches of its own layers.

    Whoever uses it does not notice the stages. All of them know the same sequences, slots and windows, and this session alone
    keeps account of recurrent states. Its device is that of the last stage, which gives the logits. A pass begins with copies
    of its inputs to the other devices, and where the next stage is on another device, what it takes is copied there.

    A draft model in one piece that is on another device than the target is a single stage away from `home`: its logits are
    copied there, where tokens are drawn from them.
    """

    def __init__(self, stages: Sequence[Session], sizes: Sequence[Sizes], whole: Sizes, home: Device | None = None):
        """Allocate what the stages pass on, and the inputs of a pass on each device.

        Args:
            stages: the sessions, in order.
            sizes: their sizes.
            whole: the sizes of the whole model.
            home: the device of the caller's buffers; None is that of the last stage.

        Raises:
            EngineError: a device has too little memory.
        """
        super().__init__(home or stages[-1].device, whole)
        self.stages = list(stages)
        self.skips_logits, self.overlaps = stages[-1].skips_logits, stages[0].overlaps and self.device.synchronous
        devices = _different([*(stage.device for stage in stages), self.device])
        self.recordable = all(stage.recordable for stage in stages) and len({device.synchronous for device in devices}) == 1
        self.ragged = len(devices) == 1 and all(stage.ragged for stage in stages)
        passed = [each.stage for each in sizes]
        self._gives = [stage.gives if stage else [] for stage in passed]
        self._boundaries = {}  # by stream
        for device in devices:
            here = [each for each, stage in zip(passed, stages, strict=True) if stage.device.stream == device.stream]
            tensors = [tensor for each in here if each for tensor in (*each.takes, *each.gives)]
            self._boundaries[device.stream] = boundary_buffers(device, tensors, whole)
        self._no_logits = {device.stream: device.zeros((1,), "float32", "no logits") for device in devices}
        lengths = [whole.batch * whole.max_rows, *[whole.batch] * (3 if whole.recurrent else 1)]
        self._away: dict[int, Buffer] = {}  # the logits of a last stage that is not at home, by the rows of a pass
        self._inputs = {  # of passes, on the devices that do not have the caller's
            device: [device.zeros((length,), "int64", "the inputs of a pass") for length in lengths]
            for device in devices
            if device.stream != self.device.stream
        }

    def bind(self, buffers: Pass) -> Launch:
        return in_sequence(self.bind_parts(buffers))

    def bind_parts(self, buffers: Pass) -> Sequence[Launch]:
        count, rows = buffers.input_ids.shape
        buffers = replace(buffers, drafted=buffers.drafted if self.ragged else None)
        passes, parts = {self.device.stream: buffers}, [list[Launch]()]
        for device in self._inputs:
            passes[device.stream], copies = self._pass_on(device, buffers)
            parts[0] += copies
        for index, stage in enumerate(self.stages):
            stream = stage.device.stream
            of_stage, last = replace(passes[stream], boundary=self._boundaries[stream]), stage is self.stages[-1]
            away = last and stream != self.device.stream
            if not last or (away and not buffers.logits.nbytes):
                of_stage = replace(of_stage, logits=self._no_logits[stream].part(0, count, 0, self.vocab_rows))
            elif away:
                of_stage = replace(of_stage, logits=self._logits_away(stage.device, buffers.logits))
            first, *others = stage.bind_parts(of_stage)
            parts[-1].append(first)
            parts += [[each] for each in others]
            parts[-1] += self._handing_on(index, count, rows)
            if away and buffers.logits.nbytes:
                parts[-1].append(self.device.receive(buffers.logits, of_stage.logits, stage.device))
        launches = [in_sequence(part) for part in parts]
        return launches if self.overlaps else [in_sequence(launches)]

    def _logits_away(self, device: Device, logits: Buffer) -> Buffer:
        """Return memory for logits on the device of the last stage. Passes run one after the other, so they share it."""
        _, rows, width = logits.shape
        if rows not in self._away:
            self._away[rows] = device.zeros((self.batch * rows * width,), "float32", "the logits of a pass")
        return self._away[rows].part(0, *logits.shape)

    def _pass_on(self, device: Device, buffers: Pass) -> tuple[Pass, list[Launch]]:
        """Return a pass over copies of its inputs on another device, and the launches that copy them there."""
        given = [buffers.input_ids, buffers.positions, *(buffers.commits or ())]
        copies = [each.part(0, *one.shape) for each, one in zip(self._inputs[device], given, strict=True)]
        commits = (copies[2], copies[3]) if buffers.commits else None
        launches = [device.receive(to, one, self.device) for to, one in zip(copies, given, strict=True)]
        return replace(buffers, input_ids=copies[0], positions=copies[1], commits=commits), launches

    def _handing_on(self, index: int, count: int, rows: int) -> list[Launch]:
        """Return the launches after a stage that copy what it gives, if the next one is on another device."""
        device, following = (self.stages[at].device for at in (index, min(index + 1, len(self.stages) - 1)))
        if following.stream == device.stream:
            return []
        given, taken = self._boundaries[device.stream], self._boundaries[following.stream]
        layout = crossing_layout(self._gives[index], count, rows)
        return [
            following.receive(taken[name].part(0, *shape), given[name].part(0, *shape), device)
            for name, (shape, _) in layout.items()
        ]

    def pair_lone_rows(self) -> None:
        for stage in self.stages:
            stage.pair_lone_rows()
        self.unbind()

    @property
    def with_features(self) -> Session:
        return self.stages[-1]

    def check(self) -> None:
        for stage in self.stages:
            stage.check()

    def reopen(self) -> None:
        for stage in self.stages:
            stage.reopen()

    def clear(self, slot: int) -> None:
        for stage in self.stages:
            stage.clear(slot)
        self._assume_empty(slot)

    def restart(self, slot: int) -> None:
        for stage in self.stages:
            stage.restart(slot)
        self._assume_empty(slot)

    def _assume_empty(self, slot: int) -> None:
        if self.recurrence is not None:
            self.recurrence.assume(slot, 0)

    def copy(self, slot: int, to: int, length: int) -> None:
        for stage in self.stages:
            stage.copy(slot, to, length)
        if self.recurrence is not None:
            self.recurrence.copy(slot, to)

    def snapshot(self, slot: int, place: int) -> None:
        for stage in self.stages:
            stage.snapshot(slot, place)

    def restore(self, place: int, slot: int, position: int) -> None:
        for stage in self.stages:
            stage.restore(place, slot, position)
        if self.recurrence is not None:
            self.recurrence.assume(slot, position)

    def cache(self) -> dict[str, npt.NDArray[Any]]:
        return {name: tensor for stage in self.stages for name, tensor in stage.cache().items()}
