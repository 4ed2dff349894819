"""What a server runs, and what it allows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Settings:
    """What a server runs, and what it allows."""

    bundle: Path
    device: str | None = None  # "cpu" or "cuda"; None is what the bundle was built on
    k: int | str = "auto"  # draft tokens a round
    drafter: str | None = None
    max_waiting: int = 64  # requests without a slot
    timeout: float = 600.0  # seconds, of an answer
    model: str = ""  # the name it answers to; "" is that of the target's checkpoint
    keys: tuple[str, ...] = field(default=(), repr=False)  # any of which must be given; none is that none need be
    hosts: tuple[str, ...] = ()  # names by which it may be asked; none is that any will do
    max_bytes: int = 1 << 20  # of a request's body
    max_choices: int = 16  # of a request: prompts times n
    max_prompt: int | None = None  # tokens; None is what the bundle holds
    log_prompts: bool = False
