"""Where a checkpoint is: a Hugging Face folder, a hub id, or a GGUF file.

Nothing here imports torch or transformers, so that a wrong path is an error at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import OutriderError, SourceError

EAGLE3, PEAGLE = "eagle3", "peagle"  # as speculators calls them
BLOCKS = ("dflash", "dspark")
MTP = "mtp"  # what `--draft` calls the head in the target's own checkpoint
NONE = "none"  # what it calls no draft at all
MASK_TOKEN = "pard_token"  # in the configuration of a parallel draft, which thereby says what it is
AGAIN = "download the checkpoint again"
CORRECT_CONFIG = "correct the checkpoint's config.json and generation_config.json, or download it again"
COUNTED, MOST = ("num_", "n_layer"), 2**16
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Source:
    """The location of a checkpoint, in the terms of `from_pretrained`."""

    name: str  # for the manifest: the hub id, or the last part of a path
    location: str
    options: dict[str, str]  # {"gguf_file": ...} for GGUF

    @classmethod
    def parse(cls, text: str) -> Source:
        """Parse the path of a folder or GGUF file, or a hub id.

        Raises:
            SourceError: it is neither a folder, nor a GGUF file, nor a hub id.
        """
        path = Path(text)
        try:
            kind = "folder" if path.is_dir() else "file" if path.is_file() else ""
        except (OSError, ValueError):  # the path is too long or contains NUL
            kind = ""
        if kind == "folder":
            if not (path / "config.json").is_file():
                files = sorted(entry.name for entry in path.glob("*.gguf"))
                hint = f"pass the GGUF file itself: {path / files[0]}" if files else "pass a Hugging Face checkpoint folder"
                raise SourceError(f"{text} has no config.json", hint)
            return cls(path.resolve().name, str(path), {})
        if kind == "file":
            with open(path, "rb") as file:
                if file.read(4) != b"GGUF":
                    raise SourceError(f"{text} is not a GGUF file", "pass a Hugging Face folder, a hub id or a GGUF file")
            return cls(path.name, str(path.parent), {"gguf_file": path.name})
        if not HUB_ID.fullmatch(text) or text in (".", "..") or path.suffix == ".gguf":
            raise SourceError(f"{text[:200]} does not exist", "pass a Hugging Face folder, a hub id or a GGUF file")
        return cls(text, text, {})

    def file(self, name: str) -> Path | None:
        """Return the path of one of the checkpoint's files, which may have to be downloaded; None if it has no such file.

        Raises:
            SourceError: the hub cannot be reached.
        """
        folder = Path(self.location)
        if folder.is_dir():
            return folder / name if (folder / name).is_file() else None
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        class File:
            @staticmethod
            def from_pretrained(location: str, **_: Any) -> str | None:
                try:
                    return hf_hub_download(location, name)
                except LocalEntryNotFoundError:  # the hub cannot be reached
                    raise
                except EntryNotFoundError:
                    return None

        path = self.read(f"file {name}", File)
        return None if path is None else Path(path)

    def config(self) -> dict[str, Any]:
        """Return the contents of config.json; of a GGUF file, which has none, nothing.

        Raises:
            SourceError: it is missing or is no JSON object, or has so many layers, heads, experts or labels that their objects
                would use up the memory.
        """
        config = {} if self.options else self.object("config.json")
        if config is None:
            raise SourceError(f"{self.name} has no config.json", AGAIN)
        for key, value in _entries(config):
            if key.startswith(COUNTED) and isinstance(value, int) and value > MOST:
                raise SourceError(f"{self.name} has {key} = {value:,}; the most is {MOST:,}", CORRECT_CONFIG)
        return config

    def object(self, name: str) -> dict[str, Any] | None:
        """Return what one of the checkpoint's files has, an object in JSON; None if there is no such file.

        Raises:
            SourceError: it cannot be read, or has something else.
        """
        path = self.file(name)
        if path is None:
            return None
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # JSON can spell half a character
        except (OSError, ValueError, RecursionError) as error:
            raise SourceError(f"cannot read the {name} of {self.name}: {error}", AGAIN) from error
        if not isinstance(value, dict):
            raise SourceError(f"the {name} of {self.name} is not an object", AGAIN)
        return value

    def drafting_role(self) -> str:
        """Return how the checkpoint drafts, as its configuration has it: the role of `bundle.manifest.ROLES` that it gets.

        Raises:
            SourceError: it has no configuration.
        """
        config = self.config()
        kind, architectures = config.get("speculators_model_type"), str(config.get("architectures")).lower()
        if kind in BLOCKS or any(each in architectures for each in BLOCKS) or "dflash_config" in config:
            return "block-head"
        if kind == PEAGLE:
            return "parallel-head"
        if kind == EAGLE3 or EAGLE3 in architectures or "eagle_config" in config or "draft_vocab_size" in config:
            return "head"
        return "parallel-draft" if MASK_TOKEN in config else "draft"

    def read(self, what: str, loader: Any, **options: Any) -> Any:
        """Call `loader.from_pretrained` on this source; every failure becomes a `SourceError` that names the source."""
        try:
            return loader.from_pretrained(self.location, **self.options, **options, trust_remote_code=False)
        except (OutriderError, MemoryError):
            raise
        except BaseException as error:  # those of transformers, safetensors, gguf and the hub client share no base class
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # Rust's, which no module exports
                raise
            reason = " ".join(str(error).split()) or type(error).__name__
            if not Path(self.location).exists():
                hint = "check the path, or the hub id and the connection to the hub"
            elif self.options:
                hint = "export the Hugging Face checkpoint that the GGUF file was made of; transformers reads few architectures"
            else:
                hint = "check that the checkpoint is complete, and that transformers supports its model type"
            raise SourceError(f"cannot read the {what} of {self.name}: {reason[:300]}", hint) from error


def _entries(value: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the entries of an object in JSON and of the objects in it."""
    for key, each in value.items():
        yield key, each
        if isinstance(each, dict):
            yield from _entries(each)
