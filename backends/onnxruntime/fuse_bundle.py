"""Writes the graphs of a bundle: fused ones that compute the same as the export's, or the export's."""

from __future__ import annotations

import shutil
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

import msgspec

from outrider.backends.comparison import check_same, passes_of_check
from outrider.backends.onnxruntime.engine import OnnxRuntimeEngines, optimize
from outrider.bundle.manifest import READS_FEATURES, WEIGHTS, Build, Manifest, graph_files, model_file
from outrider.engines.device import Cpu
from outrider.errors import OutriderWarning, reason_of
from outrider.progress import Progress

MAX_FUSED = 64  # sequences of a batch; each has its own attention nodes in every layer


def fuse_bundle(
    source: Path, folder: Path, manifest: Manifest, build: Build, progress: Progress, parts: Sequence[Any] = ()
) -> dict[str, dict[str, int]]:
    """Write graphs to `folder` that use ONNX Runtime's own operators and compute the same as those in `source`.

    Graphs that cannot be fused are copied.

    Args:
        parts: the graphs of the target's stages, if it is cut.

    Returns:
        For each rewritten model, how often each rewrite was applied.

    Raises:
        EngineError: stages that are not fused do not compute the same as the export.
    """
    counts = {}
    for role in manifest.roles if _can_fuse(manifest, build) else ():
        try:
            counts[role] = _fuse(source, folder, manifest, build, _graphs(source, role, build, parts), role, progress)
        except (MemoryError, OSError):
            raise
        except Exception as error:  # a rewrite may raise anything on a new kind of graph
            _warn(f"the {role} stays as exported, which is slower: {reason_of(error)}")
        finally:
            for part in ("fused", "final", "plain"):
                shutil.rmtree(folder / part, ignore_errors=True)
    for role in manifest.roles:
        if counts.get(role):
            continue
        if (counts.get("target") or build.stages) and role in READS_FEATURES:
            # It uses weights of the exported target, which is not copied.
            from outrider.backends.rewriting.sharing import keep_own_weights

            keep_own_weights(source / model_file(role), folder / model_file(role))
            continue
        if build.stages_of(role):
            _write_stages(source, folder, manifest, build, _graphs(source, role, build, parts), role, progress)
            continue
        for name in graph_files(role):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, folder / name)
    if (counts or build.stages) and not build.other_backends:
        from outrider.backends.rewriting.sharing import share_with_target

        share_with_target(folder, manifest.roles, build.files("target"))
    return counts


def _write_stages(
    source: Path, folder: Path, manifest: Manifest, build: Build, graphs: Mapping[str, Any], role: str, progress: Progress
) -> None:
    """Write the stages of a model as they are cut from the export, and compare them with it."""
    from outrider.backends.rewriting.graphs import save

    for name, model in graphs.items():
        (folder / name).parent.mkdir(exist_ok=True)
        save(model, folder / name)
    if build.other_backends:
        return
    few = msgspec.structs.replace(build, batch=min(build.batch, 2))  # the caches of all may only fit a GPU
    progress.stage(f"comparing the stages of the {role} with the export", passes_of_check(few))
    check_same(source, OnnxRuntimeEngines(folder, manifest, few, Cpu()), role, progress)


def _can_fuse(manifest: Manifest, build: Build) -> bool:
    """Return whether graphs of this precision and build are fused here."""
    on_cpu = build.device == "cpu"
    own = [stage.backend is None for stage in build.stages] or [True]
    places = [*compress(build.places, own), *([build.draft_device] if build.draft_device else [])]
    if len({place == "cpu" for place in places}) > 1:
        return False  # what is fused for one kind of device does not run on the other
    precisions = {model.precision for model in manifest.models.values()}
    if on_cpu and ("bf16" in precisions or build.batch > MAX_FUSED):
        return False  # the CPU has no bf16 kernels, which is reported when the engines are opened
    if not on_cpu and not precisions <= {"fp16", "bf16"}:
        return False  # FlashAttention supports only these
    try:
        import outrider.backends.onnxruntime.fusion.fuse  # noqa: F401
    except ImportError as error:
        _warn(f"the graphs stay as exported, which is slower: {error}; pip install 'outrider[build]' fuses them")
        return False
    return True


def _fuse(
    source: Path, folder: Path, manifest: Manifest, build: Build, graphs: Mapping[str, Any], role: str, progress: Progress
) -> dict[str, int]:
    """Fuse one model, compare it with the export, and write it to `folder`."""
    from outrider.backends.onnxruntime.fusion.causal import without_masks
    from outrider.backends.onnxruntime.fusion.fuse import fuse

    progress.stage(f"fusing the {role}")
    counts: Counter[str] = Counter()
    reasons: list[list[str]] = []
    for name, model in graphs.items():
        fused, final = folder / "fused" / Path(name).name, folder / "final" / name
        for path in (fused, final):
            path.parent.mkdir(parents=True, exist_ok=True)
        if build.device == "cpu":
            applied, left_out = fuse(model, fused, build.capacity, role == "target", build.batch)
            optimize(fused, final)
            reasons += [left_out] if left_out else []
        else:
            applied = without_masks(model, final)
        counts.update(applied)
        shutil.rmtree(fused.parent)
    if not counts:
        return {}
    if role != "target" or not build.other_backends:
        _compare(source, folder, manifest, build, role, counts, progress)
    for what, *why in reasons:
        if role != "block-head" or why != ["it has a mask that is not causal"]:  # a block's mask is not
            _warn(f"{what} of the {role} stays as exported, which is slower: {'; '.join(why)}")
    for name in build.own_files(role):
        (folder / name).parent.mkdir(exist_ok=True)
        for file in (name, name + WEIGHTS):
            (folder / "final" / file).replace(folder / file)
    return dict(counts)


def _compare(
    source: Path, folder: Path, manifest: Manifest, build: Build, role: str, counts: Mapping[str, int], progress: Progress
) -> None:
    """Compare a fused model in `folder` with the export."""
    from outrider.backends.onnxruntime.fusion.products import with_block_products

    progress.stage(f"comparing the fused {role} with the export", passes_of_check(build))
    rewritten = msgspec.structs.replace(build, rewrites={role: dict(counts)})
    reference = source
    if manifest.models[role].quantization is not None:  # or ONNX Runtime would keep the weights of the export twice
        reference = folder / "plain"
        (reference / model_file(role)).parent.mkdir(parents=True)
        with_block_products(source / model_file(role), reference / model_file(role))
    check_same(reference, OnnxRuntimeEngines(folder / "final", manifest, rewritten, Cpu()), role, progress)


def _graphs(source: Path, role: str, build: Build, parts: Sequence[Any]) -> dict[str, Any]:
    """Return the graphs of a role that this backend builds, by their path in a bundle, ready to be rewritten."""
    from outrider.backends.onnxruntime.fusion.sums import begin_with_sums
    from outrider.backends.rewriting.parts import graphs

    made = graphs(source, role, build.stages_of(role), parts)
    begin_with_sums(made.values())
    return {name: made[name] for name in build.own_files(role)}


def _warn(message: str) -> None:
    warnings.warn(message, OutriderWarning, stacklevel=2)
