"""The interface through which long-running work reports its progress."""

from __future__ import annotations


class Progress:
    """Receives progress reports and ignores them. The command line overrides it to show a bar."""

    def stage(self, name: str, total: int | None = None) -> None:
        """Begin a stage. `total` is its size in bytes or other units, if known."""

    def advance(self, size: int) -> None:
        """Report that `size` more units of the stage are done."""

    def note(self, text: str) -> None:
        """Describe how the stage is going."""


SILENT = Progress()
