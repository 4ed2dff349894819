"""The server's log: one line of JSON per record on standard error. A thread writes it, so a slow reader blocks no request."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from contextlib import suppress

from pythonjsonlogger.core import RESERVED_ATTRS, LogData
from pythonjsonlogger.json import JsonFormatter

from outrider.errors import show_warnings

HELD_BYTES = 4 << 20  # maximum size of the lines that wait to be written
FLUSH_SECONDS = 1.0  # time for writing them when the process ends
PERIOD, MAX_RECORDS = 10.0, 50  # seconds, and records from one line of code in that time


class JsonLines(JsonFormatter):
    """Formats a record as its time in UTC, level, logger, message and `extra` fields."""

    converter = staticmethod(time.gmtime)

    def __init__(self) -> None:
        super().__init__(
            ["asctime", "levelname", "name", "message"],
            datefmt="%Y-%m-%dT%H:%M:%SZ",
            rename_fields={"asctime": "time", "levelname": "level", "name": "logger", "exc_info": "exception"},
            reserved_attrs=[*RESERVED_ATTRS, "color_message"],  # uvicorn's message with terminal colours
        )

    def process_log_record(self, log_data: LogData) -> LogData:
        """Write levels in lower case."""
        return log_data | {"level": log_data["level"].lower()}


class RateLimit(logging.Filter):
    """Drops records that one line of code logs too often. The next record has their number. Every answer is logged."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, int], tuple[float, int]] = {}  # when the period began, and the records since

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record."""
        if record.msg == "answered":
            return True
        origin = record.pathname, record.lineno
        began, count = self._seen.get(origin, (record.created, 0))
        if record.created - began > PERIOD:
            if count > MAX_RECORDS:
                record.dropped_before = count - MAX_RECORDS
            began, count = record.created, 0
        self._seen[origin] = began, count + 1
        return count < MAX_RECORDS


class LineWriter(logging.Handler):
    """Writes records to a file from a separate thread. Drops records if too many wait; the next record has their number.

    It does not use `sys.stderr`: on exit, Python flushes that, and first waits for the thread that is writing to it.
    """

    def __init__(self, descriptor: int) -> None:
        """Write to a file descriptor."""
        super().__init__()
        self.addFilter(RateLimit())
        self.setFormatter(JsonLines())
        self._descriptor = descriptor
        self._lines: deque[bytes] = deque()
        self._held, self._lost = 0, 0  # unwritten bytes, and dropped records
        self._changed = threading.Condition()
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record, or drop it."""
        if self._lost:
            record.lost_before = self._lost
        line = f"{self.format(record)}\n".encode(errors="replace")
        with self._changed:
            if self._held + len(line) > HELD_BYTES:
                self._lost += 1
                return
            self._lost = 0
            self._held += len(line)
            self._lines.append(line)
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until everything is written, for at most `FLUSH_SECONDS`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held, FLUSH_SECONDS)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                line = self._lines.popleft()
            written = 0
            with suppress(OSError):  # the reader is gone, or the disk is full
                while written < len(line):
                    written += os.write(self._descriptor, line[written:])
            with self._changed:
                self._held -= len(line)
                self._changed.notify_all()


def log_as_json() -> None:
    """Send all records and warnings of this process to standard error as lines of JSON."""
    logging.basicConfig(level=logging.INFO, handlers=[LineWriter(sys.stderr.fileno())], force=True)
    show_warnings(logging.getLogger("outrider.serve").warning)
