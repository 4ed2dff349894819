"""A command on a terminal, as who types there sees it."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import subprocess
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.tests.support import COMMAND

READY, SENT = b"\x1b[?2004h", b"\x1b[?2004l"  # bracketed paste is on while a message is typed
DIM = b"\x1b[2m"


class Screen:
    """What a command shows on a terminal, and what is typed there."""

    def __init__(self, main: int):
        self._main, self._held = main, b""

    def until(self, mark: bytes) -> str:
        """Return what is shown up to a mark."""
        while mark not in self._held:
            assert select.select([self._main], [], [], 30)[0], self._held
            self._held += os.read(self._main, 4096)
        before, _, self._held = self._held.partition(mark)
        return before.decode().replace("\r\n", "\n")

    def answer(self) -> str:
        """Return the answer, up to the dim line after it."""
        return self.until(DIM).removesuffix("\n")

    def type(self, keys: bytes) -> None:
        os.write(self._main, keys)


@contextmanager
def terminal(*arguments: str | Path) -> Iterator[tuple[Screen, subprocess.Popen[bytes]]]:
    """Run a command on a terminal that neither echoes nor drops output at an interrupt."""
    main, child = pty.openpty()
    settings = termios.tcgetattr(child)
    settings[3] = settings[3] & ~termios.ECHO | termios.NOFLSH
    termios.tcsetattr(child, termios.TCSANOW, settings)

    def control() -> None:
        fcntl.ioctl(child, termios.TIOCSCTTY, 0)

    command = [*COMMAND, *map(str, arguments)]
    environment = {**os.environ, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}
    streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), child)
    process = subprocess.Popen(command, **streams, env=environment, start_new_session=True, preexec_fn=control)
    os.close(child)
    try:
        yield Screen(main), process
    finally:
        process.kill()
        process.wait()
        os.close(main)
