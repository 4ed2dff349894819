"""The server's log: one line of JSON per record, on standard error."""

from __future__ import annotations

import logging
import time

from pythonjsonlogger.core import RESERVED_ATTRS, LogData
from pythonjsonlogger.json import JsonFormatter

PERIOD, MAX_RECORDS = 10.0, 50  # seconds, and records from one line of code in that time


class JsonLines(JsonFormatter):
    """Formats a record as its time in UTC, level, logger, message, and whatever `extra` it has."""

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
    """Drops records that come too often from one line of code, and counts them in the next. Every answer is logged."""

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


def log_as_json() -> None:
    """Send all records of this process to standard error as lines of JSON."""
    handler = logging.StreamHandler()
    handler.addFilter(RateLimit())
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
