"""Drafters by name. A new one is a file here and an entry in `_BUILT_IN`.

The order is the order of preference, for callers that fix k and name no drafter.
"""

from __future__ import annotations

from collections.abc import Iterable

from outrider.bundle.manifest import Manifest
from outrider.errors import UsageError
from outrider.runtime.drafters.base import DeviceDrafter, Drafter
from outrider.runtime.drafters.block import BlockDrafter
from outrider.runtime.drafters.grammar import GrammarDrafter
from outrider.runtime.drafters.head import HeadDrafter
from outrider.runtime.drafters.memory import MemoryDrafter
from outrider.runtime.drafters.model import ModelDrafter
from outrider.runtime.drafters.ngram import NgramDrafter
from outrider.runtime.drafters.parallel import ParallelDrafter, ParallelHeadDrafter

_BUILT_IN = (
    HeadDrafter,
    BlockDrafter,
    ParallelHeadDrafter,
    ParallelDrafter,
    ModelDrafter,
    NgramDrafter,
    MemoryDrafter,
    GrammarDrafter,
)
_REGISTRY: dict[str, type[Drafter]] = {kind.name: kind for kind in _BUILT_IN}


def register(drafter: type[Drafter]) -> None:
    """Register a drafter under its name."""
    _REGISTRY[drafter.name] = drafter


def unregister(name: str) -> None:
    """Remove a registered drafter."""
    del _REGISTRY[name]


def names() -> list[str]:
    """Return the names of the drafters to choose from, in order of preference."""
    return [name for name, drafter in _REGISTRY.items() if not drafter.companion]


def companions() -> list[str]:
    """Return the names of the drafters that run beside the chosen one."""
    return [name for name, drafter in _REGISTRY.items() if drafter.companion]


def get(name: str) -> type[Drafter]:
    """Return a drafter by its name.

    Raises:
        UsageError: no drafter has this name.
    """
    if name not in _REGISTRY:
        raise UsageError(f"there is no drafter {name!r}", f"use one of {', '.join(names())}", param="drafter")
    return _REGISTRY[name]


def available(manifest: Manifest, *, remembering: bool = False) -> list[str]:
    """Return the names of the drafters to choose from for a bundle, in order of preference. `remembering` says whether it has a
    memory of earlier requests."""
    return [name for name in names() if get(name).available(manifest) and (remembering or not get(name).remembers)]


def on_device(names: Iterable[str]) -> list[str]:
    """Return the names of the drafters that draft on the device."""
    return [name for name in names if issubclass(get(name), DeviceDrafter)]
