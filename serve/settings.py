"""The settings of a server: its bundle and its limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from outrider.runtime.memory.memory import TOKENS, Memory

ADDRESSES = 16  # shares of the memory if clients have no keys


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of `outrider serve` that are the same with and without Ray."""

    bundle: Path
    device: str | None = None  # one of the backend's devices; None is the one that the bundle was built for
    k: int | str = "auto"  # draft tokens per round
    drafter: str | None = None
    max_waiting: int = 64  # requests that wait for a slot
    timeout: float = 600.0  # seconds per answer
    model: str = ""  # the name in the API; "" is the name of the target's checkpoint
    keys: tuple[str, ...] = field(default=(), repr=False)  # accepted API keys; empty if none is needed
    hosts: tuple[str, ...] = ()  # accepted host names; empty if any is
    max_bytes: int = 1 << 20  # of a request's body
    max_choices: int = 16  # per request: prompts times n
    chat_template: str | None = None  # instead of the bundle's
    max_prompt: int | None = None  # tokens; None is the bundle's capacity
    share_prefixes: bool = False  # whether all clients share cached prompt prefixes
    memory_tokens: int = TOKENS  # of earlier requests, to draft from
    memory_file: Path | None = None  # keeps them over a restart
    log_prompts: bool = False
    allow_special_tokens: bool = False  # whether special tokens in the text of chat messages are parsed

    def memory(self) -> Memory | None:
        """Return a new memory, with what the file keeps. Each key has a share, or each address if any may use the server.

        Raises:
            FolderError: the file cannot be read.
        """
        if not self.memory_tokens:
            return None
        anyone = not self.keys and not self.hosts
        memory = Memory(self.memory_tokens, ADDRESSES if anyone else len(self.keys) or 1, open_ended=anyone)
        return memory if self.memory_file is None else memory.read(self.memory_file)
