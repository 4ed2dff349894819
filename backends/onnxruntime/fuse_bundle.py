"""Writes the graphs of a bundle: fused ones that compute the same as the export's, or the export's."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import msgspec

from outrider.backends.comparison import check_same, passes_of_check
from outrider.backends.onnxruntime.engine import OnnxRuntimeEngines, optimize
from outrider.bundle.manifest import READS_FEATURES, Build, Manifest, graph_files, model_file
from outrider.engines.device import Cpu
from outrider.errors import OutriderWarning, reason_of
from outrider.progress import Progress

MAX_FUSED = 64  # sequences of a batch; each has its own attention nodes in every layer


def fuse_bundle(source: Path, folder: Path, manifest: Manifest, build: Build, progress: Progress) -> dict[str, dict[str, int]]:
    """Write graphs to `folder` that use ONNX Runtime's own operators and compute the same as those in `source`.

    Graphs that cannot be fused are copied.

    Returns:
        For each rewritten model, how often each rewrite was applied.
    """
    counts = {}
    for role in manifest.roles if _can_fuse(manifest, build) else ():
        try:
            counts[role] = _fuse(source, folder, manifest, build, role, progress)
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
        if counts.get("target") and role in READS_FEATURES:  # it uses weights of the exported target, which is not copied
            from outrider.backends.rewriting.sharing import keep_own_weights

            keep_own_weights(source / model_file(role), folder / model_file(role))
            continue
        for name in graph_files(role):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, folder / name)
    if counts:
        from outrider.backends.rewriting.sharing import share_with_target

        share_with_target(folder, manifest.roles)
    return counts


def _can_fuse(manifest: Manifest, build: Build) -> bool:
    """Return whether graphs of this precision and build are fused here."""
    on_cpu = build.device == "cpu"
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


def _fuse(source: Path, folder: Path, manifest: Manifest, build: Build, role: str, progress: Progress) -> dict[str, int]:
    """Fuse one model, compare it with the export, and write it to `folder`."""
    from outrider.backends.onnxruntime.fusion.causal import without_masks
    from outrider.backends.onnxruntime.fusion.fuse import fuse
    from outrider.backends.onnxruntime.fusion.products import with_block_products

    progress.stage(f"fusing the {role}")
    fused, final = folder / "fused" / "model.onnx", folder / "final" / model_file(role)
    for path in (fused, final):
        path.parent.mkdir(parents=True)
    left_out: list[str] = []
    if build.device == "cpu":
        counts, left_out = fuse(source / model_file(role), fused, build.capacity, role == "target", build.batch)
        optimize(fused, final)
    else:
        counts = without_masks(source / model_file(role), final)
        if not counts:
            return {}
    shutil.rmtree(fused.parent)
    progress.stage(f"comparing the fused {role} with the export", passes_of_check(build))
    rewritten = msgspec.structs.replace(build, rewrites={role: counts})
    reference = source
    if manifest.models[role].quantization is not None:  # or ONNX Runtime would keep the weights of the export twice
        reference = folder / "plain"
        (reference / model_file(role)).parent.mkdir(parents=True)
        with_block_products(source / model_file(role), reference / model_file(role))
    check_same(reference, OnnxRuntimeEngines(folder / "final", manifest, rewritten, Cpu()), role, progress)
    if left_out and (role != "block-head" or left_out[1:] != ["it has a mask that is not causal"]):  # a block's mask is not
        _warn(f"{left_out[0]} of the {role} stays as exported, which is slower: {'; '.join(left_out[1:])}")
    for name in graph_files(role):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / "final" / name).replace(folder / name)
    return counts


def _warn(message: str) -> None:
    warnings.warn(message, OutriderWarning, stacklevel=2)
