"""Outrider: a draft and a target language model, compiled into engines and served with speculative decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.runtime.generation import Event, Outrider
    from outrider.runtime.grammar.structured import StructuredOutputs
    from outrider.runtime.memory.memory import Memory
    from outrider.runtime.params import SamplingParams

__all__ = ["Event", "Memory", "Outrider", "SamplingParams", "StructuredOutputs", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Loaded on first use, so that importing the package, or the command's help, needs none of a stage's libraries.
    if name in __all__:
        from outrider.runtime import generation

        return getattr(generation, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
