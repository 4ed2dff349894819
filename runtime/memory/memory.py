"""The texts of finished requests by owner, and the file that keeps them."""

from __future__ import annotations

import hashlib
import io
import os
import time
import zipfile
import zlib
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outrider.bundle.folder import write_whole
from outrider.bundle.manifest import TOKENIZER, Manifest
from outrider.errors import FolderError, UsageError
from outrider.runtime.memory.ngram_store import END, NgramStore

TOKENS = 1_000_000
LEAST = 64  # tokens of a share that is of use
IDLE = 3600.0  # seconds after which an owner that was not known beforehand is forgotten
SALT_BYTES = 16
MODEL, SALT = "model", "salt"  # in the file, beside the tokens of each owner
UNREADABLE = (
    OSError,
    EOFError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    RuntimeError,
    zlib.error,
    zipfile.BadZipFile,
)


class Memory:
    """The texts of finished requests, by owner. What it proposes to an owner depends on no other owner's texts.

    Each owner has an equal share of the tokens from the start: a share that varied would reveal how active the others are.
    """

    def __init__(
        self,
        tokens: int = TOKENS,
        file: str | Path | None = None,
        *,
        owners: Sequence[Hashable] = (None,),
        places: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Remember up to `tokens` tokens in all, and what a file keeps, if it exists.

        Args:
            file: that `write` writes. Only this user can read it.
            owners: whose requests are remembered. Outside of servers, requests have the owner None.
            places: shares for other owners, first come, first served; each is free again after an idle hour.
            clock: returns seconds.

        Raises:
            UsageError: there are too few tokens.
            FolderError: the file cannot be read, or cannot be written later.
        """
        self._share = tokens // max(len(owners) + places, 1)
        if self._share < LEAST:
            raise UsageError(
                f"{tokens:,} tokens of memory for {len(owners) + places:,} clients are fewer than {LEAST} for each",
                "remember more tokens, or none",
            )
        self._places, self._clock = places, clock
        self._file = None if file is None else Path(file).resolve()
        self._salt = os.urandom(SALT_BYTES)  # a file names owners by keyed hashes
        self._model = ""  # whose token ids these are
        self._stores: dict[str, NgramStore] = {}
        self._used: dict[str, float] = {}  # by owner in a place: seconds, by the clock
        self._tokens = 0
        self.changed = False  # whether there is more than in the file
        texts = {} if self._file is None else self._read(self._file)
        self._known = {self._name(owner) for owner in owners}
        for name, tokens_of_owner in texts.items():
            self._begin(name)
            if name in self._stores:
                for text in np.split(tokens_of_owner, np.flatnonzero(tokens_of_owner == END) + 1):
                    if len(text) > 1:
                        self._stores[name].append(text[:-1].tolist())
                self._tokens += len(self._stores[name])

    def __len__(self) -> int:
        return self._tokens

    def attach(self, manifest: Manifest) -> None:
        """Note whose token ids are remembered.

        Raises:
            UsageError: the memory is of a model with another vocabulary.
        """
        model = f"{manifest.files[TOKENIZER].sha256} {manifest.vocab_rows}"
        if self._model not in ("", model):
            raise UsageError("the memory holds requests of a model with another vocabulary", "use a memory of its own")
        self._model = model

    def propose(self, owner: Hashable, text: Sequence[int], k: int) -> tuple[list[int], int]:
        """Propose up to `k` tokens after a text of an owner; see `NgramStore.propose`."""
        name = self._name(owner)
        self._forget_idle()
        if name not in self._stores:
            return [], 0
        self._touch(name)
        return self._stores[name].propose(text, k)

    def append(self, owner: Hashable, text: Sequence[int], prompt: int) -> None:
        """Remember a text of an owner; its first `prompt` tokens were the prompt."""
        name = self._name(owner)
        self._forget_idle()
        self._begin(name)
        if (store := self._stores.get(name)) is not None:
            self._touch(name)
            before = len(store)
            store.append(text, prompt)
            self._tokens += len(store) - before
            self.changed = True

    def clear(self) -> None:
        """Forget all texts."""
        self._stores.clear()
        self._used.clear()
        self._tokens, self.changed = 0, True

    def _name(self, owner: Hashable) -> str:
        return hashlib.blake2b(repr(owner).encode(), key=self._salt, digest_size=16).hexdigest()

    def _begin(self, name: str) -> None:
        """Give an owner its share, if it has one."""
        if name not in self._stores and (name in self._known or len(self._used) < self._places):
            self._stores[name] = NgramStore(self._share)
            self._touch(name)

    def _touch(self, name: str) -> None:
        if name not in self._known:
            self._used[name] = self._clock()

    def _forget_idle(self) -> None:
        if self._used:
            oldest = self._clock() - IDLE
            for name in [name for name, used in self._used.items() if used < oldest]:
                self._tokens -= len(self._stores.pop(name))
                del self._used[name]

    def write(self) -> None:
        """Write all texts to the file.

        Raises:
            FolderError: it cannot be written.
        """
        if self._file is not None:
            content = io.BytesIO()
            arrays: dict[str, Any] = {name: store.contents() for name, store in self._stores.items()}
            arrays |= {MODEL: np.array(self._model), SALT: np.frombuffer(self._salt, np.uint8)}
            np.savez(content, **arrays)
            write_whole(self._file, content.getvalue(), mode=0o600)
            self.changed = False

    def _read(self, path: Path) -> dict[str, Any]:
        """Return the tokens of each owner in a file, by name."""
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise FolderError(f"cannot write {path}", "choose a file in a folder that exists and can be written")
        try:
            with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
                texts = {name: file[name] for name in file.files}
            model, salt = str(texts.pop(MODEL)), texts.pop(SALT).tobytes()
            for tokens in texts.values():
                if len(salt) != SALT_BYTES or tokens.dtype != np.int32 or tokens.ndim != 1 or (tokens < END).any():
                    raise ValueError("this is not a memory")
                if (tokens >= int(model.split()[1])).any():
                    raise ValueError("a token is not in the vocabulary")
        except FileNotFoundError:
            return {}
        except UNREADABLE as error:
            raise FolderError(f"cannot read the memory in {path}", "choose another file, or delete this one") from error
        self._model, self._salt = model, salt
        return texts
