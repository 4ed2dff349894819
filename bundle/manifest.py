"""`manifest.json`: what an export or a bundle is, and the digest of each of its files.

Both folders use one schema; only a bundle has `build`. Everything is plain data, and nothing in it depends on when or
where it was written except the measured costs, so the same inputs give the same export.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from outrider.engines.contract import CONTRACT_VERSION, DRAFTERS, SAMPLERS, window_buckets
from outrider.errors import FolderError

SCHEMA_VERSION = 4
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
ROLES = ("target", "draft")
ENGINES = (*ROLES, *SAMPLERS)
TENSORRT = {"tensorrt-rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}  # backend -> the Python package that builds and runs it
EXTRAS = {"tensorrt-rtx": "rtx", "tensorrt": "tensorrt"}  # backend -> what of outrider's extras installs it

Positive = Annotated[int, msgspec.Meta(ge=1, le=2**48)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Milliseconds = Annotated[float, msgspec.Meta(gt=0, lt=1e9)]
Shape = Annotated[list[Positive], msgspec.Meta(min_length=1)]
Profile = dict[str, tuple[Shape, Shape, Shape]]  # input -> its least, likeliest and greatest shape; of `candidates`, values


def model_file(role: str) -> str:
    """The path of a role's graph inside an export or a bundle; its weights lie beside it with `.data` added."""
    return f"{role}/model.onnx"


def sampler_file(name: str) -> str:
    """The path of one of `contract.SAMPLERS` inside an export or a bundle."""
    return f"sampler/{name}.onnx"


def engine_file(name: str) -> str:
    """The path inside a TensorRT bundle of one of `ENGINES`, compiled."""
    return f"{name}/model.plan" if name in ROLES else f"sampler/{name}.plan"


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
    # Of quantized models: on the text in export/heldout.py, the graph's and the checkpoint's in fp32.
    perplexity: float | None = None
    reference_perplexity: float | None = None


class Quantization(Struct, frozen=True):
    """How a model's weights were rounded: in blocks along the input dimension, each with a scale in fp32."""

    method: str  # rtn (round to nearest) or auto-round
    head_precision: str  # int4, int8 or fp32: of the product that gives the logits
    block: Positive  # inputs of a block's layer that share a scale, where it divides their number; else 64 or 32 do
    weights: int  # that were rounded
    kept: dict[str, int]  # matrices left in fp32, without embeddings, and how many weights each has


class Model(Struct, frozen=True):
    """One of the two models."""

    source: str
    architecture: str
    parameters: int
    precision: str  # fp32, fp16, bf16, int4 or int8; the last two are of weights, and all else is fp32
    vocab_rows: Positive  # width of the logits, padding included
    max_positions: Positive | None  # positions the model was made for; None where it knows no bound
    layers: list[tuple[Positive, Positive, Positive]]  # (key/value heads, key width, value width) of each
    parity: Parity
    quantization: Quantization | None = None
    head_tokens: Positive | None = None  # how many tokens a draft may propose, where not all


class Generation(Struct, frozen=True):
    """Defaults that generation needs, from the target's checkpoint."""

    eos_token_ids: list[int]
    special_tokens: dict[str, str]  # bos_token, eos_token, ...: what a chat template may name


class Cost(Struct, frozen=True):
    """Milliseconds of one pass of `batch` sequences, over `runs` runs; a step model's ends at the end of `window`."""

    rows: Positive
    window: Annotated[int, msgspec.Meta(ge=0)]  # 0 for samplers, which have none
    batch: Positive
    median: Milliseconds
    fastest: Milliseconds
    slowest: Milliseconds
    runs: Positive


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
    costs: dict[str, list[Cost]]  # by engine; empty where none was measured
    # The first below is ONNX Runtime's, the other three are TensorRT's.
    rewrites: dict[str, dict[str, int]]  # role -> rewrite -> how often it was made in the graph; empty where it is as exported
    compute_capabilities: list[str]  # such as 8.9, that the engines may run on; empty leaves it to the plans themselves
    profiles: dict[str, list[Profile]]  # engine -> its optimisation profiles, in order, without the cache's tensors
    version_compatible: bool  # plans that newer releases of the package run, too, with the host code that is in them
    # By drafter, the share of the target's own greedy tokens that it would have proposed, over prompts that ship with outrider.
    acceptance: dict[str, Share] = {}  # empty where none was measured

    @property
    def max_rows(self) -> int:
        """The longest pass that an engine is built for."""
        return max(self.max_prompt_chunk, self.k[-1] + 1, 2)

    def rows(self, engine: str) -> list[tuple[int, int]]:
        """The least and the greatest rows of a pass, for each profile of one of `ENGINES`."""
        tensor = "input_ids" if engine in ROLES else "logits"
        shapes = [profile.get(tensor, ([0], [0], [0])) for profile in self.profiles.get(engine, [])]
        return [(least[1], most[1]) if len(least) > 1 and len(most) > 1 else (0, 0) for least, _, most in shapes]


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
    def roles(self) -> tuple[str, ...]:
        """Of the models that there are: a target may come without a draft."""
        return tuple(role for role in ROLES if role in self.models)

    @property
    def samplers(self) -> tuple[str, ...]:
        """Of `contract.SAMPLERS`, those that the models need."""
        return tuple(name for name in SAMPLERS if "draft" in self.models or name not in DRAFTERS)

    @property
    def engines(self) -> tuple[str, ...]:
        """Of `ENGINES`, those that the models need."""
        return self.roles + self.samplers

    @property
    def widths(self) -> tuple[int, int]:
        """Of the target's logits and of the draft's; without a draft, no sampler looks at the second."""
        target = self.models["target"].vocab_rows
        return target, self.models["draft"].vocab_rows if "draft" in self.models else target

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
    if set(manifest.models) not in ({"target"}, set(ROLES)):
        raise msgspec.ValidationError(f"it names the models {sorted(manifest.models)}, not {' and '.join(ROLES)}")
    build = manifest.build
    tensorrt = build is not None and build.backend in TENSORRT
    if tensorrt:
        needed = {TOKENIZER, *map(engine_file, manifest.engines)}
    else:
        needed = {TOKENIZER, *map(sampler_file, manifest.samplers)}
        needed |= {name for role in manifest.roles for name in (model_file(role), model_file(role) + ".data")}
    if missing := sorted(needed - manifest.files.keys()):
        raise msgspec.ValidationError(f"it does not list {missing[0]}")
    rows = manifest.models["target"].vocab_rows
    if not all(0 <= token < rows for token in manifest.generation.eos_token_ids):
        raise msgspec.ValidationError("an end-of-text id is no token - at `$.generation.eos_token_ids`")
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
    verified = {k + 1 for k in build.k}
    if tensorrt:
        for name in manifest.engines:
            needed_rows = {1} if name in DRAFTERS else {1, *verified} | ({2} if name in ROLES else set())
            spans = {(rows, rows) for rows in needed_rows} | ({(1, build.max_prompt_chunk)} if name in ROLES else set())
            if not spans <= set(build.rows(name)):
                raise msgspec.ValidationError(f"profiles of the {name} are missing - at `$.build.profiles`")
    if build.costs or not tensorrt:  # TensorRT's are measured on the GPU that runs it, which need not be the one that builds
        for name in manifest.engines:
            measured = {(cost.window, cost.rows) for cost in build.costs.get(name, []) if cost.batch == 1}
            if name in manifest.roles:
                wanted = {(window, rows) for window in build.windows for rows in {1, 2, *verified} if rows <= window}
            else:
                wanted = {(0, rows) for rows in ({1} if name in DRAFTERS else {1, *verified})}
            if not wanted <= measured:
                raise msgspec.ValidationError(f"costs of the {name} are missing - at `$.build.costs`")
