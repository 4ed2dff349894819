"""The server's log: one line of JSON per record, on standard error."""

from __future__ import annotations

import logging
import time

from pythonjsonlogger.core import RESERVED_ATTRS, LogData
from pythonjsonlogger.json import JsonFormatter


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


def log_as_json() -> None:
    """Send all records of this process to standard error as lines of JSON."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
