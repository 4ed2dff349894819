"""Replace a part of another library for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def swapped(place: Any, name: str, ours: Any) -> Iterator[None]:
    """Give a module or a class another attribute within a `with` statement."""
    theirs = vars(place)[name]
    setattr(place, name, ours)
    try:
        yield
    finally:
        setattr(place, name, theirs)
