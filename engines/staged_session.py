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


def boundary_buffers(device: Device, tensors: Iterable[Tensor], sizes: Sizes) -> dict[str, Buffer]:
    """Return memory for what stages give each other, by name, for the largest pass of a session.

    Raises:
        EngineError: the device has too little memory.
    """
    return {name: device.zeros(*each, "what stages pass on") for name, each in boundary_layout(tensors, sizes).items()}


def check_stages(device: Device, stages: Iterable[Stage], precision: str, whole: Sizes) -> None:
    """Check that the caches of all stages, and what they pass on, fit together before the first of them is opened.

    Args:
        precision: key of `PRECISIONS`.
        whole: the sizes of the whole model.

    Raises:
        EngineError: they do not fit.
    """
    own = PRECISIONS[precision].dtype
    caches = [((whole.batch, *each.sizes(whole.capacity, whole.recent)), each.dtype or own) for each in whole.tensors]
    passed = boundary_layout((tensor for stage in stages for tensor in stage.gives), whole)
    check_memory(device, whole, [*caches, *passed.values()])


class StagedSession(Session):
    """The stages of a model, each a session with the caches of its own layers.

    Whoever uses it does not notice the stages. All of them know the same sequences, slots and windows, and this session alone
    keeps account of recurrent states.
    """

    def __init__(self, stages: Sequence[Session], sizes: Sequence[Sizes], whole: Sizes):
        """Allocate what the stages pass on.

        Args:
            stages: the sessions, in order.
            sizes: their sizes.
            whole: the sizes of the whole model.

        Raises:
            EngineError: the device has too little memory.
        """
        super().__init__(stages[0].device, whole)
        self.stages = list(stages)
        self.skips_logits = stages[-1].skips_logits
        self.recordable = all(stage.recordable for stage in stages)
        passed = [tensor for each in sizes if each.stage is not None for tensor in each.stage.gives]
        self._boundary = boundary_buffers(self.device, passed, whole)

    def bind(self, buffers: Pass) -> Launch:
        count, _, width = buffers.logits.shape
        last = replace(buffers, boundary=self._boundary)
        others = replace(last, logits=buffers.logits.part(0, count, 0, width))
        return in_sequence([*(stage.bind(others) for stage in self.stages[:-1]), self.stages[-1].bind(last)])

    def pair_lone_rows(self) -> None:
        for stage in self.stages:
            stage.pair_lone_rows()
        self.unbind()

    @property
    def with_features(self) -> Session:
        return self.stages[-1]

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
