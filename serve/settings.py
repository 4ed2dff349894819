"""The settings of a server: its bundle and its limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of `outrider serve` that do not depend on how it is run."""

    bundle: Path
    device: str | None = None  # one of the backend's; None is the device that the bundle was built on
    k: int | str = "auto"  # draft tokens per round
    drafter: str | None = None
    max_waiting: int = 64  # requests that wait for a slot
    timeout: float = 600.0  # seconds per answer
    model: str = ""  # the name in the API; "" is the name of the target's checkpoint
    keys: tuple[str, ...] = field(default=(), repr=False)  # accepted API keys; empty if none is needed
    hosts: tuple[str, ...] = ()  # accepted host names; empty if any is
    max_bytes: int = 1 << 20  # of a request's body
    max_choices: int = 16  # per request: prompts times n
    max_prompt: int | None = None  # tokens; None is the bundle's capacity
    share_prefixes: bool = False  # whether clients share what was read of their prompts
    log_prompts: bool = False
    allow_special_tokens: bool = False  # whether text of chat messages may be special tokens
