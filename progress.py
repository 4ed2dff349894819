"""How long work tells whoever waits for it how far it is."""

from __future__ import annotations


class Progress:
    """Takes reports and shows nothing; the command line shows them."""

    def stage(self, name: str, total: int | None = None) -> None:
        """A stage begins; `total` is how many bytes, or other parts, it takes, where that is known."""

    def advance(self, size: int) -> None:
        """That many bytes, or parts, more are done."""


SILENT = Progress()
