"""`manifest.json`: what an export or a bundle is, and the digest of each of its files.

Both folders use one schema; only a bundle has `build`. Everything is plain data, and nothing in it depends on when or
where it was written except the measured costs, so the same inputs give the same export.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from outrider.engines.contract import CONTRACT_VERSION, SAMPLERS, window_buckets
from outrider.engines.errors import FolderError

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
ROLES = ("target", "draft")

Positive = Annotated[int, msgspec.Meta(ge=1, le=2**48)]
Rows = Annotated[str, msgspec.Meta(pattern=r"^[1-9][0-9]{0,14}$")]


def model_file(role: str) -> str:
    """The path of a role's graph inside an export or a bundle; its weights lie beside it with `.data` added."""
    return f"{role}/model.onnx"


def sampler_file(name: str) -> str:
    """The path of one of `contract.SAMPLERS` inside an export or a bundle."""
    return f"sampler/{name}.onnx"


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the manifest's parts: immutable, and strict when read."""


class FileEntry(Struct, frozen=True):
    """One file of the folder."""

    sha256: str
    size: Annotated[int, msgspec.Meta(ge=0)]  # bytes


class Parity(Struct, frozen=True):
    """How far the exported graph's logits are from the checkpoint's own, over `rows` rows in uneven chunks."""

    rows: int
    max_abs_diff: float
    tolerance: float
    argmax_agreement: float  # share of rows, 0..1


class Model(Struct, frozen=True):
    """One of the two models."""

    source: str
    architecture: str
    parameters: int
    precision: str  # fp32, fp16 or bf16
    vocab_rows: Positive  # width of the logits, padding included
    max_positions: Positive | None  # positions the model was made for; None where it knows no bound
    layers: list[tuple[Positive, Positive, Positive]]  # (key/value heads, key width, value width) of each
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
    k: list[Positive]  # in order
    capacity: Positive
    batch: Positive
    max_prompt_chunk: Positive
    windows: list[Positive]
    costs: dict[str, dict[Rows, Cost]]  # role or sampler -> rows of the pass -> cost

    @property
    def max_rows(self) -> int:
        """The longest pass that an engine is built for."""
        return max(self.max_prompt_chunk, self.k[-1] + 1, 2)


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
        _check(manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # a ValidationError is a DecodeError
        raise FolderError(f"{MANIFEST} is damaged: {' '.join(str(error).split())}", again) from error
    return manifest


def _check(manifest: Manifest) -> None:
    """What types alone cannot say. Raises `msgspec.ValidationError`."""
    if sorted(manifest.models) != sorted(ROLES):
        raise msgspec.ValidationError(f"it names the models {sorted(manifest.models)}, not {sorted(ROLES)}")
    needed = {TOKENIZER} | {name for role in ROLES for name in (model_file(role), model_file(role) + ".data")}
    needed |= {sampler_file(name) for name in SAMPLERS}
    if missing := sorted(needed - manifest.files.keys()):
        raise msgspec.ValidationError(f"it does not list {missing[0]}")
    rows = manifest.models["target"].vocab_rows
    if not all(0 <= token < rows for token in manifest.generation.eos_token_ids):
        raise msgspec.ValidationError("an end-of-text id is no token - at `$.generation.eos_token_ids`")
    build = manifest.build
    if build is None:
        return
    if any(build.capacity > model.max_positions for model in manifest.models.values() if model.max_positions):
        raise msgspec.ValidationError("its capacity is more than a model was made for - at `$.build.capacity`")
    if not build.k or build.k != sorted(set(build.k)):
        raise msgspec.ValidationError("its k are not in order - at `$.build.k`")
    if build.windows != window_buckets(build.capacity):
        raise msgspec.ValidationError("its windows do not fit its capacity - at `$.build.windows`")
    if build.capacity < max(build.k[-1] + 2, build.max_prompt_chunk):
        raise msgspec.ValidationError("its capacity does not hold its k or prompt chunk - at `$.build.capacity`")
    for role in ROLES:
        if not {str(k + 1) for k in build.k} <= build.costs.get(role, {}).keys():
            raise msgspec.ValidationError(f"costs of the {role} are missing - at `$.build.costs`")
