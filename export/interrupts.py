"""Interrupts that Python or torch would lose."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def kept_interrupts() -> Iterator[None]:
    """Raise an interrupt when the block ends, if not before.

    Torch, in a callback from C++, makes another error of it and may go on after that, and Python, while it makes a class.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield  # no interrupt arrives here
        return
    arrived: list[KeyboardInterrupt] = []

    def noted(number: int, frame: FrameType | None) -> None:
        try:
            previous(number, frame)
        except KeyboardInterrupt as interrupt:
            arrived.append(interrupt)
            raise

    signal.signal(signal.SIGINT, noted)
    try:
        yield
    except Exception:
        if not arrived:
            raise
    finally:
        signal.signal(signal.SIGINT, previous)
    if arrived:
        raise KeyboardInterrupt
