"""A simulated GPU that passes the checks of the device layer."""

from __future__ import annotations

import numpy as np

from outrider.engines.device import Buffer, Launch
from outrider.errors import EngineError
from outrider.tests.deferred import Deferred


class Simulated(Deferred):
    """A device that refuses to allocate a gigabyte."""

    def memory(self) -> tuple[int, int]:
        return 1 << 30, 1 << 31

    def zeros(self, shape: tuple[int, ...], dtype: str, what: str) -> Buffer:
        if shape[0] >= 1 << 30:
            raise EngineError(f"no memory for {what}", "none")
        return super().zeros(shape, dtype, what)


def fill(gpu: Simulated, buffer: Buffer, value: int) -> Launch:
    return gpu.deferred(lambda: buffer.view().fill(value))


def copy(gpu: Simulated, target: Buffer, source: Buffer) -> Launch:
    return gpu.deferred(lambda: np.copyto(target.view(), source.view()))
