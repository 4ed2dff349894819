"""The texts of finished requests by owner, and the file that keeps them."""

from __future__ import annotations

import hashlib
import io
import os
import time
import zipfile
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, Self

import numpy as np

from outrider.bundle.folder import write_whole
from outrider.bundle.manifest import Manifest
from outrider.errors import FolderError, UsageError
from outrider.runtime.memory.suffixes import END, SuffixStore

TOKENS = 1_000_000
LEAST = 64  # tokens of a share that is of use
IDLE = 3600.0  # seconds after which an owner's texts are forgotten, if there are more owners than shares
TOKENIZER, SALT = "tokenizer", "salt"


class Memory:
    """The texts of finished requests, by owner. What it proposes to an owner depends on no other owner's texts.

    Each owner has an equal share of the tokens from the start: a share that varied would reveal how active the others are.
    """

    def __init__(self, tokens: int = TOKENS, owners: int = 1, *, open_ended: bool = False):
        """Remember up to `tokens` tokens in all, for up to `owners` owners. Further owners have no memory.

        Args:
            open_ended: whether there may be more owners, so that owners are forgotten after an idle hour.
        """
        self._share = tokens // owners
        self._owners, self._open_ended = owners, open_ended
        self._stores: dict[str, SuffixStore] = {}
        self._used: dict[str, float] = {}  # by owner: seconds, by the clock
        self._salt = os.urandom(16)  # a file names owners by keyed hashes
        self._tokenizer = ""
        self.clock: Callable[[], float] = time.monotonic

    def __len__(self) -> int:
        return sum(map(len, self._stores.values()))

    def attach(self, manifest: Manifest) -> None:
        """Note whose token ids are remembered.

        Raises:
            UsageError: the memory is of another tokenizer.
        """
        tokenizer = manifest.files["tokenizer.json"].sha256
        largest = max((int(store.contents().max()) for store in self._stores.values()), default=0)
        if self._tokenizer not in ("", tokenizer) or largest >= manifest.vocab_rows:
            raise UsageError("the memory holds requests of a model with another tokenizer", "use a memory of its own")
        self._tokenizer = tokenizer

    def store(self, owner: Hashable, *, begin: bool = False) -> SuffixStore | None:
        """Return the texts of an owner, or None if it has none and does not `begin` to, or cannot."""
        now = self.clock()
        if self._open_ended:
            for name in [name for name, used in self._used.items() if now - used > IDLE]:
                del self._stores[name], self._used[name]
        name = hashlib.blake2b(repr(owner).encode(), key=self._salt, digest_size=16).hexdigest()
        if name in self._stores or (begin and len(self._stores) < self._owners and self._share >= LEAST):
            self._used[name] = now
            return self._stores.setdefault(name, SuffixStore(self._share))
        return None

    def clear(self) -> None:
        """Forget all texts."""
        self._stores.clear()
        self._used.clear()

    def write(self, path: Path) -> None:
        """Write all texts to a file that only this user can read.

        Raises:
            FolderError: it cannot be written.
        """
        content = io.BytesIO()
        arrays: dict[str, Any] = {name: store.contents() for name, store in self._stores.items()}
        arrays |= {TOKENIZER: np.array(self._tokenizer), SALT: np.frombuffer(self._salt, np.uint8)}
        np.savez(content, **arrays)
        write_whole(path, content.getvalue(), mode=0o600)

    def read(self, path: Path) -> Self:
        """Add the texts of a file, if it exists, and return this memory.

        Raises:
            FolderError: it cannot be read, or cannot be written later.
        """
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise FolderError(f"cannot write {path}", "choose a file in a folder that exists and can be written")
        try:
            with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
                texts = {name: file[name] for name in file.files}
            self._tokenizer, self._salt = str(texts.pop(TOKENIZER)), texts.pop(SALT).tobytes()
            for name, tokens in list(texts.items())[: self._owners if self._share >= LEAST else 0]:
                if tokens.dtype != np.int32 or tokens.ndim != 1 or (len(tokens) and tokens.min() < END):
                    raise ValueError("these are no tokens")
                self._stores[name], self._used[name] = SuffixStore(self._share), self.clock()
                for text in np.split(tokens, np.flatnonzero(tokens == END) + 1):
                    if len(text) > 1:
                        self._stores[name].append(text[:-1].tolist())
        except FileNotFoundError:
            pass
        except (OSError, EOFError, KeyError, ValueError, AttributeError, zipfile.BadZipFile) as error:
            raise FolderError(f"cannot read the memory in {path}", "delete the file, or choose another") from error
        return self
