"""The location of a checkpoint: a Hugging Face folder, a hub id, or a GGUF file.

A hub id becomes a commit of the model when it is parsed, and all files are read from that commit's folder, whatever is pushed
to the hub later. Nothing here imports torch or transformers, so that a wrong path fails at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider import errors
from outrider.errors import OutriderError, SourceError
from outrider.export.checkpoints.hub import Snapshot
from outrider.progress import SILENT, Progress

EAGLE3, PEAGLE = "eagle3", "peagle"  # speculators' names
BLOCKS = ("dflash", "dspark")
MTP = "mtp"  # the value of `--draft` for the MTP head in the target's checkpoint
NONE = "none"  # the value of `--draft` for no draft
MASK_TOKEN = "pard_token"  # the key that marks the configuration of a parallel draft
AGAIN = "download the checkpoint again"
CORRECT_CONFIG = "correct the checkpoint's config.json and generation_config.json, or download it again"
COUNTED, MOST = ("num_", "n_layer"), 2**16
HUB_ID = re.compile(r"(\w[\w.-]*(?:/\w[\w.-]*)?)(?::([\w.-]+))?")  # and the tag of a GGUF file


@dataclass(frozen=True, slots=True)
class Source:
    """The location of a checkpoint, as arguments of `from_pretrained`."""

    name: str  # for the manifest: the hub id, or the last part of a path
    location: str  # a folder; for a hub id, its files may have to be downloaded first
    options: dict[str, str]  # {"gguf_file": ...} for GGUF
    snapshot: Snapshot | None = None  # the commit on the hub

    @classmethod
    def parse(cls, text: str) -> Source:
        """Parse the path of a folder or GGUF file, or a hub id, perhaps with the tag of a GGUF file, such as OWNER/NAME:Q4_K_M.

        Raises:
            SourceError: the text is none of these, or the hub does not have it or cannot be reached.
            UnsupportedModelError: the model is in several GGUF files.
        """
        path = Path(text)
        try:
            kind = "folder" if path.is_dir() else "file" if path.is_file() else ""
        except (OSError, ValueError):  # the path is too long or contains NUL
            kind = ""
        if kind == "folder":
            if (path / "config.json").is_file():
                return cls(path.resolve().name, str(path), {})
            if len(files := sorted(path.glob("*.gguf"))) == 1:
                return cls.parse(str(files[0]))
            if files:
                raise SourceError(f"{text} has several GGUF files", f"pass one of them: {', '.join(map(str, files))}")
            raise SourceError(f"{text} has no config.json", "pass a Hugging Face checkpoint folder")
        if kind == "file":
            with open(path, "rb") as file:
                if file.read(4) != b"GGUF":
                    raise SourceError(f"{text} is not a GGUF file", "pass a Hugging Face folder, a hub id or a GGUF file")
            return cls(path.name, str(path.parent), {"gguf_file": path.name})
        found = HUB_ID.fullmatch(text)
        if found is None or text in (".", "..") or (path.suffix == ".gguf" and not found[2]):
            raise SourceError(f"{text[:200]} does not exist", "pass a Hugging Face folder, a hub id or a GGUF file")
        snapshot = Snapshot.read(found[1], found[2] or "")
        if snapshot.gguf is None:
            return cls(text, str(snapshot.folder), {}, snapshot)
        path = snapshot.folder / snapshot.gguf
        return cls(text, str(path.parent), {"gguf_file": path.name}, snapshot)

    @property
    def gguf(self) -> Path | None:
        """The path of the GGUF file, which may have to be downloaded first; None for another checkpoint."""
        return Path(self.location, self.options["gguf_file"]) if self.options else None

    def download(self, progress: Progress) -> None:
        """Download what an export reads of a model on the hub, with progress, unless it is here.

        Raises:
            SourceError: the hub refuses access or cannot be reached, or the disk is full.
        """
        if self.snapshot is not None:
            self.snapshot.download(progress)

    def file(self, name: str) -> Path | None:
        """Return the path of one of the checkpoint's files, perhaps after a download; None if there is no such file.

        Raises:
            SourceError: the hub cannot be reached.
        """
        if self.snapshot is not None:
            self.snapshot.download(SILENT, [name])
        path = Path(self.location, name)
        return path if path.is_file() else None

    def config(self) -> dict[str, Any]:
        """Return the contents of config.json; an empty dictionary for a GGUF file.

        Raises:
            SourceError: the file is missing or has no JSON object, or its numbers of layers, heads, experts or labels would use
                up the memory.
        """
        config = {} if self.options else self.object("config.json")
        if config is None:
            raise SourceError(f"{self.name} has no config.json", AGAIN)
        for key, value in _entries(config):
            if key.startswith(COUNTED) and isinstance(value, int) and value > MOST:
                raise SourceError(f"{self.name} has {key} = {value:,}; the most is {MOST:,}", CORRECT_CONFIG)
        return config

    def object(self, name: str) -> dict[str, Any] | None:
        """Return the JSON object in one of the checkpoint's files; None if there is no such file.

        Raises:
            SourceError: the file cannot be read, or has no JSON object.
        """
        path = self.file(name)
        if path is None:
            return None
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # JSON can contain half a surrogate pair
        except (OSError, ValueError, RecursionError) as error:
            raise SourceError(f"cannot read the {name} of {self.name}: {error}", AGAIN) from error
        if not isinstance(value, dict):
            raise SourceError(f"the {name} of {self.name} is not an object", AGAIN)
        return value

    def quantization(self) -> dict[str, Any]:
        """Return the `quantization_config`, under its other names, too, or what ModelOpt writes beside a config.json.

        Empty if there is neither.

        Raises:
            SourceError: there is no configuration, or its method has no name.
        """
        config = self.config()
        text = config.get("text_config")
        text = text if isinstance(text, dict) else {}
        given = (config.get("quantization_config"), config.get("compression_config"), text.get("quantization_config"))
        settings = next((each for each in given if each is not None), None)
        if settings is None and not self.options:
            settings = (self.object("hf_quant_config.json") or {}).get("quantization")
            settings = settings | {"quant_method": "modelopt"} if isinstance(settings, dict) else None
        if not isinstance(settings, dict):
            return {}
        if not isinstance(method := settings.get("quant_method", ""), str):
            raise SourceError(f"the quant_method of {self.name} is {method!r:.50}, not a name", CORRECT_CONFIG)
        return settings

    def stored_bits(self) -> int | None:
        """Return how many bits the weights of a quantized checkpoint have, according to its configuration: the most of them.

        None if none are integers, or for a GGUF file, whose tensors each have a type.

        Raises:
            SourceError: see `quantization`.
        """
        settings = self.quantization()
        bits: list[Any] = []
        if settings.get("quant_method") in ("awq", "gptq", "auto-round"):
            rules = (settings.get("dynamic"), settings.get("extra_config"))  # for single modules
            others = [each for rule in rules if isinstance(rule, dict) for each in rule.values()]
            bits = [each.get("bits") for each in (settings, *others) if isinstance(each, dict)]
        if settings.get("quant_method") == "modelopt" and settings.get("quant_algo") == "W4A16_AWQ":
            bits = [4]
        schemes = _schemes(settings)
        if any(each.get("type") == "int" for each in schemes):  # others among them take more
            bits = [each.get("num_bits") for each in schemes]
        return max((each for each in bits if isinstance(each, int) and each <= 8), default=None)  # 16 bits: floats

    def reorders(self) -> bool:
        """Return whether weights that share a scale belong to inputs in another order (act-order), so that each product has to
        reorder its inputs.

        Raises:
            SourceError: see `quantization`.
        """
        settings = self.quantization()
        return bool(settings.get("desc_act")) or any(each.get("actorder") == "group" for each in _schemes(settings))

    def drafting_role(self) -> str:
        """Return the checkpoint's role as a draft, one of `bundle.manifest.ROLES`, according to its configuration.

        Raises:
            SourceError: there is no configuration.
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
        """Call `loader.from_pretrained` on this source, and turn every failure into a `SourceError` that names the source."""
        try:
            return loader.from_pretrained(self.location, **self.options, **options, trust_remote_code=False)
        except (OutriderError, MemoryError):
            raise
        except BaseException as error:  # transformers, safetensors, gguf and the hub client have no common base class
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # Rust's, which no module exports
                raise
            if isinstance(error, ImportError):
                hint = "install the package that the message names"
            elif self.options:
                hint = "export the Hugging Face checkpoint behind the file; transformers reads few architectures from GGUF"
            else:
                hint = "check that the checkpoint is complete, and that transformers supports its model type"
            raise SourceError(f"cannot read the {what} of {self.name}: {reason_of(error)}", hint) from error


def _schemes(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return how compressed-tensors has quantized groups of weights, according to a `quantization_config`."""
    groups = settings.get("config_groups") if settings.get("quant_method") == "compressed-tensors" else None
    given = [each.get("weights") for each in groups.values() if isinstance(each, dict)] if isinstance(groups, dict) else []
    return [each for each in given if isinstance(each, dict)]


def reason_of(error: BaseException) -> str:
    """Return what an error of another library says, in one line of at most 300 characters."""
    return errors.reason_of(error)[:300]


def _entries(value: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a JSON object and of the objects in it."""
    for key, each in value.items():
        yield key, each
        if isinstance(each, dict):
            yield from _entries(each)
