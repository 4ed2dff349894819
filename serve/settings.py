"""The settings of a server: its bundle and its limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from outrider.errors import UsageError
from outrider.runtime.drafters.memory import MemoryDrafter
from outrider.runtime.memory.memory import TOKENS, Memory
from outrider.runtime.policy.choice import AUTO
from outrider.serve.network.access import owner_of

ADDRESSES, LOCAL_ADDRESSES = 16, 4  # shares of the memory if clients have no keys
MEMORY = MemoryDrafter.name


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of `outrider serve` that are the same with and without Ray."""

    bundle: Path
    device: str | None = None  # one of the backend's devices; None is the one that the bundle was built for
    stage_cores: int | None = None  # of each stage of the target but the last; None runs all stages in one process
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
        """Return a new memory, with what the file keeps; None if it would not be used. Each key has a share; without keys, each
        address has.

        Raises:
            UsageError: there are too few tokens for the keys, or a file or the drafter needs a memory that is not used.
            FolderError: the file cannot be read, or cannot be written later.
        """
        chosen = self.drafter in (AUTO, MEMORY) or (self.drafter is None and self.k == AUTO)
        if not self.memory_tokens or not chosen or self.k == 0:
            if self.memory_file is not None:
                raise UsageError(
                    "--memory cannot be used: nothing would be drafted from it", "leave it out, or --k and --drafter"
                )
            if self.drafter == MEMORY and not self.memory_tokens:
                raise UsageError(
                    "--drafter memory cannot be used: --memory-tokens 0 remembers nothing", "leave one of them out"
                )
            return None
        places = 0 if self.keys else LOCAL_ADDRESSES if self.hosts else ADDRESSES
        owners = [owner_of(key) for key in self.keys]
        return Memory(self.memory_tokens, self.memory_file, owners=owners, places=places)
