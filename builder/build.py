"""`outrider build-engine` and `outrider calibrate`: build a bundle of engines from an exported pair, and measure it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from outrider.backends import registry
from outrider.backends.base import Backend, check_costs
from outrider.backends.build_spec import BuildSpec
from outrider.backends.open import open_bundle, open_engines
from outrider.builder.acceptance import measure_acceptance
from outrider.builder.defaults import backends, longest
from outrider.builder.passes import measure
from outrider.builder.stages import StageOptions, in_stages, stage_place
from outrider.bundle.folder import digest_all, read_manifest, staged, write_whole
from outrider.bundle.integrity import unchanged
from outrider.bundle.manifest import MANIFEST, READS_FEATURES, Build, Manifest
from outrider.engines.contract import window_buckets
from outrider.errors import DeviceError, EngineError, FolderError, OutriderError, OutriderWarning, UsageError
from outrider.progress import SILENT, Progress
from outrider.runtime import drafters
from outrider.runtime.generation import Outrider
from outrider.runtime.policy.choice import AUTO
from outrider.runtime.text.text import Text

DEFAULT_CAPACITY = 1024
DEFAULT_CHUNK = 64


def build_engine(
    source: Path,
    output: Path,
    *,
    backend: str,
    k: list[int],
    capacity: int | None = None,
    batch: int,
    max_prompt_chunk: int | None = None,
    device: str | None = None,
    options: Mapping[str, Any] | None = None,
    stages: str | None = None,
    stage_devices: Sequence[str] = (),
    stage_backends: Sequence[str] = (),
    draft_device: str | None = None,
    measured: Build | None = None,
    progress: Progress = SILENT,
) -> Manifest:
    """Build the bundle `output` from the export `source`, and return its manifest.

    Args:
        backend: one of `registry.names()`, or "auto" for the one that `defaults.backends` prefers and that takes the models.
        k: numbers of draft tokens per round; 0, plain decoding, is always available.
        capacity: positions of the cache, for prompt and answer together; None is 1024, or the models' maximum if that is
            less.
        batch: maximum number of sequences in a batch.
        max_prompt_chunk: maximum number of prompt tokens per pass; None is 64, or the capacity if that is less.
        device: where to measure, one of the backend's `devices`; None is the backend's default.
        options: values for the backend's `options`, by name.
        stages: into how many stages to cut the target, or the layers of each, such as "0-13,14-27"; None does not cut it.
        stage_devices: of each stage, such as "cuda:1" or "cpu:threads=4", in place of `device`; empty if all are on one.
        stage_backends: of each stage, in place of `backend`; empty if all have one.
        draft_device: where draft models run, such as "cuda:0"; None is where the last stage does, or the whole target.
        measured: a build to take costs and acceptance from, so that no engine runs; None measures here.

    Raises:
        UsageError: the sizes do not fit each other, the models or `measured`, or the backend does not have an option.
        FolderError: the export is damaged, or the output cannot be written.
        EngineError: the backend refuses a model, or does not run it.
    """
    manifest, options = read_manifest(source), dict(options or {})
    if manifest.build is not None:
        raise FolderError(f"{source} is already a bundle", "pass the folder that outrider export wrote")
    capacity = longest(manifest, DEFAULT_CAPACITY) if capacity is None else capacity
    max_prompt_chunk = min(DEFAULT_CHUNK, capacity) if max_prompt_chunk is None else max_prompt_chunk
    wanted = StageOptions(stages, [*map(stage_place, stage_devices)], stage_backends)
    backend, device = wanted.of_last_stage(backend, device)
    needed = [device, draft_device, *(each.device for each in wanted.places)]
    *preferred, last = _backends(backend, manifest, [each for each in needed if each is not None])
    others = [_backends(name, manifest, ()) for name in stage_backends]
    spec = BuildSpec(source, manifest, output, sorted(set(k)), capacity, batch, max_prompt_chunk, device, options)
    spec = replace(spec, draft_device=draft_device)
    _check_sizes(spec)
    spec = in_stages(spec, wanted, [[*preferred, last], *others])
    if measured is not None:
        _check_measured(measured, spec)
    for role, model in manifest.models.items():
        if model.trained_k is not None and model.trained_k < spec.k[-1]:
            message = (
                f"the {role} was trained to draft {model.trained_k} tokens; with k = {spec.k[-1]}, more are rarely accepted"
            )
            warnings.warn(message, OutriderWarning, stacklevel=2)
    for chosen in preferred:
        try:
            return _build(chosen, spec, measured, progress)
        except DeviceError:
            raise
        except EngineError as error:
            progress.stage(f"building for {last.name}, because {error}")
    return _build(last, spec, measured, progress)


def _build(backend: Backend, spec: BuildSpec, measured: Build | None, progress: Progress) -> Manifest:
    """Build for one backend; see `build_engine`."""
    _check_options(backend, spec.options)
    _check_device(backend, spec.device)
    names = spec.stage_backends or [backend.name] * len(spec.ends)
    owners = [registry.get(name) for name in names]
    for owner, each in zip(owners, spec.stage_devices or [spec.device or "cpu"] * len(owners), strict=True):
        if not owner.has(each):
            known = [*owner.devices, *(f"{kind}:0" for kind in owner.numbered)]
            hint = f"use {', '.join(known)}, or cpu:threads=4 for 4 threads"
            raise UsageError(f"{owner.name} has no device {each!r} for stages", hint)
    of_stages = zip(spec.stage_devices, owners, strict=bool(spec.stage_devices))
    spec = replace(spec, stage_devices=[_with_number(each, owner) for each, owner in of_stages])
    spec = replace(spec, draft_device=_away(backend, spec))
    with staged(spec.output) as folder:
        with unchanged(spec.source) as intact:
            build = backend.build(replace(spec, source=intact), folder, progress)
            build = _with_other_stages(replace(spec, source=intact), folder, build, progress)
        manifest = msgspec.structs.replace(spec.manifest, files=digest_all(folder, progress))
        try:
            if measured is None:
                build = _measured(folder, manifest, build, progress, quickly=True)
            else:
                costs = {name: measured.costs[name] for name in manifest.engines}  # the other bundle may have more drafters
                usable = drafters.available(manifest)
                acceptance = {name: share for name, share in measured.acceptance.items() if name in usable}
                build = msgspec.structs.replace(build, costs=costs, acceptance=acceptance)
        except DeviceError as error:
            if backend.requires_costs:
                raise
            progress.stage(f"could not measure costs, because this machine cannot run the engines ({error})")
        sealed = msgspec.structs.replace(manifest, build=build)
        (folder / MANIFEST).write_bytes(sealed.encode())
    return sealed


def _away(backend: Backend, spec: BuildSpec) -> str | None:
    """Return the device of drafts by its number, or None if it is that of the last stage."""
    wanted = spec.draft_device
    if wanted is None:
        return None
    if not {*spec.manifest.roles} - {"target", *READS_FEATURES}:
        raise UsageError(
            "--draft-device is for draft models, and the export has none", "leave it out: heads run beside the target"
        )
    if not backend.has(wanted):
        known = [*backend.devices, *(f"{kind}:0" for kind in backend.numbered)]
        hint = f"use {' or '.join(known)}" if known else "leave it out"
        raise UsageError(f"{backend.name} has no device {wanted!r} for drafts", hint)
    last = spec.stage_devices[-1] if spec.stage_devices else spec.device or backend.devices[0]
    own, last = (_with_number(each, backend) for each in (wanted, last))
    return None if own == last else own


def _with_number(device: str, backend: Backend) -> str:
    return f"{device}:0" if device in backend.numbered else device


def _with_other_stages(spec: BuildSpec, folder: Path, build: Build, progress: Progress) -> Build:
    """Let other backends write their stages of the target, and compare all with the export."""
    if not build.other_backends:
        return build
    from outrider.backends.comparison import check_same, passes_of_check
    from outrider.backends.rewriting.sharing import share_with_target

    made = {name: registry.get(name).build_stages(spec, folder, build.seen_by(name), progress) for name in build.other_backends}
    stages = [msgspec.structs.replace(each, backend=each.backend and made[each.backend.name]) for each in build.stages]
    build = msgspec.structs.replace(build, stages=stages)
    share_with_target(folder, spec.manifest.roles, build.files("target"))
    progress.stage("comparing the stages of the target with the export", passes_of_check(build))
    check_same(spec.source, open_engines(folder, spec.manifest, build, "cpu"), "target", progress)  # also without the GPUs
    return build


def calibrate(bundle: Path, progress: Progress = SILENT, device: str | None = None) -> Manifest:
    """Measure a bundle's costs and its draft's acceptance on this machine, and write them into its manifest.

    Args:
        device: where to measure, one of the backend's `devices`, which also becomes the bundle's default; None is the bundle's
            current default.

    Raises:
        FolderError: the folder is not a bundle, is damaged, or cannot be written.
        EngineError: an engine does not run here.
        UsageError: the backend does not run on that device.
    """
    write_whole(bundle / MANIFEST, read_manifest(bundle).encode())  # fails before measuring if it cannot be written
    with unchanged(bundle) as folder:
        manifest, build = open_bundle(folder, progress)
        if device is not None:
            _check_device(registry.get(build.backend), device)
            build = build.in_one_place(device)
        sealed = msgspec.structs.replace(manifest, build=_measured(folder, manifest, build, progress, quickly=False))
    write_whole(folder / MANIFEST, sealed.encode())
    return sealed


def _check_measured(measured: Build, spec: BuildSpec) -> None:
    sizes = {"k": spec.k, "windows": window_buckets(spec.capacity)}
    try:
        check_costs(spec.manifest, msgspec.structs.replace(measured, **sizes))
    except FolderError as error:
        raise UsageError(
            "the costs do not include every pass of these engines",
            "take them from a bundle with the same models, k and capacity, or measure here",
        ) from error


def _measured(folder: Path, manifest: Manifest, build: Build, progress: Progress, *, quickly: bool) -> Build:
    """Return `build` with its acceptance and costs measured; quickly, on fewer prompts and with fitted costs."""
    progress.stage("loading the models")
    with Outrider(open_engines(folder, manifest, build), Text.load(folder, manifest), build.batch) as loaded:
        try:  # first, because passes that are timed leave nonsense in the caches
            build = msgspec.structs.replace(build, acceptance=measure_acceptance(loaded, progress, few=quickly))
        except (OutriderError, MemoryError) as error:  # a bundle is useful without it: the first rounds measure it
            progress.stage(f"could not measure acceptance ({error})")
        return msgspec.structs.replace(build, costs=measure(loaded, progress, fit=quickly))


def _backends(name: str, manifest: Manifest, devices: Sequence[str]) -> list[Backend]:
    """Return the named backend, or for "auto" those that the rule prefers and that have the devices."""
    if name == AUTO:
        ranked = [registry.get(choice.backend) for choice in backends(manifest)]
        return [each for each in ranked if all(map(each.has, devices))] or ranked
    if name not in registry.names():
        raise UsageError(f"there is no backend {name!r}", f"use one of {', '.join(registry.names())}")
    return [registry.get(name)]


def _check_options(backend: Backend, options: Mapping[str, Any]) -> None:
    known = {option.name for option in backend.options}
    for name in options.keys() - known:
        flag = "--" + name.replace("_", "-")
        owners = [each for each in registry.names() if name in {option.name for option in registry.get(each).options}]
        raise UsageError(
            f"{flag} does not apply to the backend {backend.name}",
            f"leave it out; it is for {' and '.join(owners)}" if owners else "leave it out; no backend has it",
        )


def _check_device(backend: Backend, device: str | None) -> None:
    if device is None or device in backend.devices:
        return
    if backend.devices:
        raise UsageError(f"{backend.name} has no device {device!r}", f"use one of {', '.join(backend.devices)}")
    owners = [name for name in registry.names() if registry.get(name).devices]
    raise UsageError(
        f"--device does not apply to the backend {backend.name}", f"leave it out; it is for {' and '.join(owners)}"
    )


def check_capacity(capacity: int, k: list[int]) -> None:
    """Check that a cache holds a round.

    Raises:
        UsageError: it does not.
    """
    if capacity < k[-1] + 2:
        raise UsageError(f"a capacity of {capacity} does not hold k = {k[-1]}", f"use --capacity {k[-1] + 2} or more")


def _check_sizes(spec: BuildSpec) -> None:
    if not spec.k or spec.k[0] < 1:
        raise UsageError(
            f"k is {spec.k or 'empty'}; each must be at least 1", "use --k 1,2,4,8, for example; 0 is always available"
        )
    if spec.batch < 1:
        raise UsageError(f"the batch is {spec.batch}; it must be at least 1", "use --batch 1, for example")
    check_capacity(spec.capacity, spec.k)
    if not 1 <= spec.max_prompt_chunk <= spec.capacity:
        raise UsageError(
            f"a prompt chunk of {spec.max_prompt_chunk} does not fit a capacity of {spec.capacity}",
            "use a smaller --max-prompt-chunk",
        )
    for role, model in spec.manifest.models.items():
        if model.max_positions is not None and spec.capacity > model.max_positions:
            raise UsageError(
                f"the {role} ({model.source}) supports {model.max_positions} positions, and the capacity is {spec.capacity}",
                f"use --capacity {model.max_positions} or less",
            )
