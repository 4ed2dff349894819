"""Ways in which a device may be broken, each in place of one of its methods."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from outrider.engines.device import Buffer, Launch, in_sequence, nothing
from outrider.errors import EngineError


def outdated(gpu: Any, host: Any, buffer: Buffer) -> Any:
    """Upload what the host's memory holds now, not when the copy runs."""
    held = host.copy()
    return gpu.deferred(lambda: np.copyto(buffer.view(), held))


def at_once(gpu: Any, target: Buffer, source: Buffer, _: Any) -> Any:
    """Copy without waiting for the other device."""
    return gpu.deferred(lambda: np.copyto(target.view(), source.view()))


def without_telling(gpu: Any, target: Buffer, source: Buffer, other: Any) -> Any:
    """Let the other device go on before the copy has run."""
    return in_sequence([gpu.deferred(other.synchronize), gpu.deferred(lambda: np.copyto(target.view(), source.view()))])


def alone(gpu: Any, launches: Sequence[Launch]) -> Any:
    """Record the work of other devices, but do not wait for what they did before."""
    others = gpu.linked()
    return gpu.record([*(each.follow(gpu) for each in others), *launches, *(gpu.follow(each) for each in others)])


def careless(gpu: Any, launches: Sequence[Launch]) -> Launch:
    """Record without passing exceptions on."""
    for launch in launches:
        with suppress(EngineError):
            launch()
    return nothing
