"""Reads `manifest.json`, and checks everything in it that does not depend on the backend."""

from __future__ import annotations

import msgspec

from outrider.bundle.manifest import (
    MANIFEST,
    READS_FEATURES,
    READS_MASKS,
    REMAKE,
    ROLES,
    SCHEMA_VERSION,
    TOKENIZER,
    Build,
    Manifest,
    Model,
    graph_files,
)
from outrider.engines.contract import (
    BATCH_DIM,
    CONTRACT_VERSION,
    PAST_FEATURES,
    ROWS_DIM,
    Stage,
    cache_tensors,
    window_buckets,
)
from outrider.engines.precisions import DTYPES, PRECISIONS
from outrider.errors import FolderError


class _Versions(msgspec.Struct):
    """The only fields whose meaning must never change."""

    schema_version: int
    contract_version: int = CONTRACT_VERSION


def damaged(reason: str) -> FolderError:
    """Return the error for a manifest with impossible contents."""
    return FolderError(f"{MANIFEST} is damaged: {' '.join(reason.split())}", REMAKE)


def decode_manifest(data: bytes) -> Manifest:
    """Parse a manifest, and check everything that does not depend on the backend. `Backend.check` checks the rest.

    Raises:
        FolderError: it is not JSON, has another schema or contract version, or has missing, unknown or wrong fields.
    """
    try:
        versions = msgspec.json.decode(data, type=_Versions)
        if versions.schema_version > SCHEMA_VERSION or versions.contract_version > CONTRACT_VERSION:
            raise FolderError(
                f"{MANIFEST} has schema {versions.schema_version} and contract {versions.contract_version}; this outrider"
                f" reads up to {SCHEMA_VERSION} and {CONTRACT_VERSION}",
                "upgrade outrider, or make the folder again with this one",
            )
        if versions.schema_version < SCHEMA_VERSION or versions.contract_version < CONTRACT_VERSION:
            raise FolderError(f"{MANIFEST} was written by an older outrider, and its engines have another contract", REMAKE)
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # a ValidationError is a DecodeError
        raise damaged(str(error)) from error
    _check(manifest)
    return manifest


def _check(manifest: Manifest) -> None:
    """Raise `FolderError` for contents that the types allow, but that are impossible."""
    if not {"target"} <= set(manifest.models) <= set(ROLES):
        raise damaged(f"its models are {sorted(manifest.models)}; it must have a target, and may have {', '.join(ROLES[1:])}")
    features = {role: model.features for role, model in manifest.models.items() if model.features is not None}
    heads = [role for role in READS_FEATURES if role in manifest.models]
    if features.keys() != ({"target", *heads} if heads else set()) or len({*features.values()}) > 1 or len(heads) > 1:
        raise damaged("target and head disagree on features - at `$.models`")
    for role, model in manifest.models.items():
        if any(min(each) < 0 for each in model.recurrent) or (model.recurrent and role != "target"):
            raise damaged(f"it has impossible recurrent layers - at `$.models.{role}.recurrent`")
        if role != "block-head" and (model.block_state, model.from_anchor, model.trained_k) != (None, False, None):
            raise damaged(f"only a block head has a block - at `$.models.{role}`")
        if role in READS_FEATURES and (model.mask_token or 0) >= model.vocab_rows:  # a parallel draft may have one token more
            raise damaged(f"the mask token is not in the vocabulary - at `$.models.{role}.mask_token`")
        if (model.mask_token is not None) != (role in READS_MASKS):
            raise damaged(f"only a model that drafts in one pass has a mask token - at `$.models.{role}.mask_token`")
        if model.precision not in PRECISIONS:
            raise damaged(f"{model.precision!r} is not one of {', '.join(PRECISIONS)} - at `$.models.{role}.precision`")
    rows = manifest.vocab_rows
    if any(model.vocab_rows != rows for model in manifest.models.values()):
        raise damaged("its models have logits of different widths - at `$.models`")
    if not all(0 <= token < rows for token in manifest.generation.eos_token_ids):
        raise damaged("an end-of-text id is not in the vocabulary - at `$.generation.eos_token_ids`")
    if (build := manifest.build) is not None:
        _check_build(manifest, build)
        return
    required = {TOKENIZER, *(file for name in manifest.engines for file in graph_files(name))}
    if missing := sorted(required - manifest.files.keys()):
        raise damaged(f"it does not list {missing[0]}")


def _check_build(manifest: Manifest, build: Build) -> None:
    if any(build.capacity > model.max_positions for model in manifest.models.values() if model.max_positions):
        raise damaged("its capacity exceeds a model's maximum positions - at `$.build.capacity`")
    if not build.k or build.k != sorted(set(build.k)):
        raise damaged("its k are not in ascending order - at `$.build.k`")
    if build.windows != window_buckets(build.capacity):
        raise damaged("its windows do not match its capacity - at `$.build.windows`")
    _check_stages(manifest.models["target"], build.stages)
    if build.capacity < max(build.k[-1] + 2, build.max_prompt_chunk):
        raise damaged("its capacity is too small for its k or prompt chunk - at `$.build.capacity`")


def _check_stages(target: Model, stages: list[Stage]) -> None:
    """Raise `FolderError` unless the stages have every layer and every tensor of the cache once, and fit together."""
    if not stages:
        return
    ends = [-1, *(stage.layers[1] for stage in stages)]
    follows = [stage.layers[0] == end + 1 <= stage.layers[1] for stage, end in zip(stages, ends, strict=False)]
    given = [[], *(stage.gives for stage in stages)]
    passed = [tensor for stage in stages for tensor in stage.gives]
    sizes = [size for tensor in passed for size in tensor.shape]
    possible = all(size > 0 if isinstance(size, int) else size in (BATCH_DIM, ROWS_DIM) for size in sizes)
    caches = [each.past for each in cache_tensors(target.layers, target.features, target.recurrent)]
    have = [name for stage in stages for name in stage.inputs if name.startswith("past_")]
    fit = given == [*(stage.takes for stage in stages), []] and sorted(have) == sorted(caches)
    fit &= not any(PAST_FEATURES in stage.inputs for stage in stages[:-1])  # heads run beside the last stage
    if not all(follows) or not fit or not possible or any(tensor.dtype not in DTYPES for tensor in passed):
        raise damaged("its stages do not fit together - at `$.build.stages`")
