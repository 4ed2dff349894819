"""The signals that end a server."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

ENDING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]  # Windows has no SIGHUP


def handle_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    """Set the handler of these signals, except signals that the parent process ignores, as nohup does."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
