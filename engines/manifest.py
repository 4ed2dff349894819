"""`manifest.json`: what an export or a bundle is, and the digest of each of its files.

Both folders use one schema; only a bundle has `build`. Everything is plain data, and nothing in it depends on when or
where it was written except the measured costs, so the same inputs give the same export.
"""

from __future__ import annotations

import msgspec

from outrider.engines.contract import CONTRACT_VERSION
from outrider.engines.errors import FolderError

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
ROLES = ("target", "draft")


def model_file(role: str) -> str:
    """The path of a role's graph inside an export or a bundle; its weights lie beside it with `.data` added."""
    return f"{role}/model.onnx"


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the manifest's parts: immutable, and strict when read."""


class FileEntry(Struct, frozen=True):
    """One file of the folder."""

    sha256: str
    size: int  # bytes


class Parity(Struct, frozen=True):
    """How far the exported graph's logits are from the checkpoint's own, over `rows` rows in uneven chunks."""

    rows: int
    max_abs_diff: float
    tolerance: float
    argmax_agreement: float  # share of rows, 0..1
    near_ties: int  # rows whose argmax differs only where the checkpoint's two best logits are within the tolerance


class Model(Struct, frozen=True):
    """One of the two models."""

    source: str
    architecture: str
    parameters: int
    precision: str  # fp32, fp16 or bf16
    vocab_rows: int  # width of the logits, padding included
    max_positions: int | None  # positions the model was made for; None where it knows no bound
    layers: list[tuple[int, int, int]]  # (key/value heads, key width, value width) of each
    parity: Parity


class Generation(Struct, frozen=True):
    """Defaults that generation needs, from the target's checkpoint."""

    eos_token_ids: list[int]
    special_tokens: dict[str, str]  # bos_token, eos_token, ...: what a chat template may name


class Cost(Struct, frozen=True):
    """Milliseconds of one pass, over `runs` runs at the smallest window."""

    median: float
    fastest: float
    slowest: float
    runs: int


class Build(Struct, frozen=True):
    """How a bundle's engines were built."""

    backend: str
    backend_version: str
    device: str  # what it was built on or for
    k: list[int]
    capacity: int
    batch: int
    max_prompt_chunk: int
    windows: list[int]
    costs: dict[str, dict[str, Cost]]  # role -> rows of the pass -> cost


class Manifest(Struct, frozen=True):
    """The whole of `manifest.json`, less the version that is read first."""

    schema_version: int
    contract_version: int
    outrider_version: str
    vocab_tokens: int
    models: dict[str, Model]
    generation: Generation
    files: dict[str, FileEntry]
    build: Build | None = None

    @property
    def precision(self) -> str:
        """The precision of the pair."""
        return self.models["target"].precision

    def encode(self) -> bytes:
        """Readable JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


class _Versions(msgspec.Struct):
    """The only part whose meaning may never change."""

    schema_version: int
    contract_version: int = CONTRACT_VERSION


def decode_manifest(data: bytes) -> Manifest:
    """The manifest in `data`.

    Raises:
        FolderError: it is not JSON, of another schema or contract version, or has missing, unknown or ill-typed fields.
    """
    again = "make the folder again with this outrider: outrider export, then outrider build-engine"
    try:
        versions = msgspec.json.decode(data, type=_Versions)
        if versions.schema_version > SCHEMA_VERSION or versions.contract_version > CONTRACT_VERSION:
            raise FolderError(
                f"{MANIFEST} has schema {versions.schema_version} and contract {versions.contract_version}; this outrider"
                f" reads up to {SCHEMA_VERSION} and {CONTRACT_VERSION}",
                "upgrade outrider, or make the folder again with this one",
            )
        if versions.schema_version < SCHEMA_VERSION or versions.contract_version < CONTRACT_VERSION:
            raise FolderError(f"{MANIFEST} is of an older outrider, whose engines have another contract", again)
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.DecodeError as error:  # ValidationError is one too
        raise FolderError(f"{MANIFEST} is damaged: {error}", again) from error
    if sorted(manifest.models) != sorted(ROLES):
        raise FolderError(f"{MANIFEST} is damaged: it names the models {sorted(manifest.models)}, not {sorted(ROLES)}", again)
    return manifest
