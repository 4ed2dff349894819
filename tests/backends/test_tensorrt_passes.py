"""What TensorRT's engines run: the profile of each pass, kernels that are kept for the next load, and every shape at load."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from outrider.backends.tensorrt.engine import RuntimeCache, cache_file, choose_profile
from outrider.backends.tensorrt.engines import warm
from outrider.backends.tensorrt.package import plan_file
from outrider.backends.tensorrt.profiles import sampler_profiles, step_profiles
from outrider.bundle.folder import read_manifest
from outrider.bundle.integrity import check_files
from outrider.engines.device import Launch
from outrider.engines.session import Pass
from outrider.errors import EngineError
from outrider.progress import SILENT
from outrider.runtime.generation import Outrider
from outrider.tests.support import build

pytest.importorskip("tensorrt_rtx", reason="would show how a TensorRT-RTX engine runs its passes: pip install 'outrider[rtx]'")
K, CHUNK = [1, 2, 4, 8], 64


@pytest.mark.parametrize("batch", [1, 4])
def test_each_pass_takes_the_profile_of_its_rows(batch: int) -> None:
    profiles = step_profiles(K, 1024, 4, CHUNK)
    spans = [(profile["input_ids"][0][1], profile["input_ids"][2][1]) for profile in profiles]
    for rows in (1, 2, 3, 5, 9, 4, 17, 64):
        for window in (64, 128, 1024):
            shapes = {"input_ids": (batch, rows), "positions": (batch,), "key_positions": (window,)}
            shapes["past_key_0"] = (batch, 2, 1024, 8)  # no profile speaks of the cache
            want = (rows, rows) if rows in (1, 2, 3, 5, 9) else (1, CHUNK)
            assert spans[choose_profile(profiles, shapes)] == want


@pytest.mark.parametrize(
    "beyond", [{"input_ids": (1, 65)}, {"input_ids": (5, 9)}, {"key_positions": (2048,)}, {"key_positions": (32,)}]
)
def test_a_shape_beyond_the_profiles_is_refused_with_what_to_build(beyond: dict[str, tuple[int, ...]]) -> None:
    shapes = {"input_ids": (1, 9), "positions": (1,), "key_positions": (64,)} | beyond
    with pytest.raises(EngineError, match=r"no profile of the engine accepts input_ids \[") as refused:
        choose_profile(step_profiles(K, 1024, 4, CHUNK), shapes)
    assert "--k, a larger --capacity, --batch or --max-prompt-chunk" in refused.value.hint


@pytest.mark.parametrize(("rows", "candidates"), [(1, 1), (5, 256), (9, 3840)])
def test_the_verifiers_profile_depends_on_rows_and_candidates(rows: int, candidates: int) -> None:
    profiles = sampler_profiles("verifier", K, 1, 5000)
    shapes = {
        "logits": (1, rows, 5000),
        "drafted": (1, rows),
        "drafted_count": (1,),
        "q": (rows, 1, 5000),
        "settings": (1, 8),
        "edit_ids": (1, 16),
        "edits": (1, 16, 4),
        "uniforms": (1, rows, 3),
        "candidates": [candidates],
    }
    assert profiles[choose_profile(profiles, shapes)]["logits"][0][1] == rows
    with pytest.raises(EngineError, match="no profile"):
        choose_profile(profiles, shapes | {"candidates": [3841]})


class Kernels:
    """A runtime cache as far as files go; it takes only what begins with "kernels"."""

    def __init__(self, content: bytes = b""):
        self.content = content

    def serialize(self) -> memoryview:
        return memoryview(self.content)

    def deserialize(self, blob: bytes) -> bool:
        taken = blob.startswith(b"kernels")
        self.content = blob if taken else self.content
        return taken


def test_kernels_are_kept_beside_the_bundle_and_read_again(rtx_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(rtx_bundle, tmp_path / "bundle"))
    manifest = read_manifest(bundle)
    file = cache_file(bundle, manifest, plan_file("target"))
    assert file.parent.parent == bundle.parent
    assert file != cache_file(bundle, manifest, plan_file("draft"))
    first = RuntimeCache(Kernels(), file)
    assert first.cache.content == b""
    first.cache.content = b"kernels of a GPU"
    first.save()
    assert RuntimeCache(Kernels(), file).cache.content == b"kernels of a GPU"
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    file.write_bytes(b"of another GPU")
    assert RuntimeCache(Kernels(b"own"), file).cache.content == b"own"
    check_files(bundle, manifest)  # the bundle is as it was sealed
    RuntimeCache(Kernels(b"kernels"), Path("/proc/nothing/kernels.bin")).save()  # no place for them is no error


def test_every_shape_of_a_round_is_run_at_load_and_leaves_nothing_in_the_cache(tiny_export: Path, tmp_path: Path) -> None:
    built = build(tiny_export, tmp_path / "bundle", k=[1, 4], capacity=256, batch=2)
    with Outrider.load(built, slots=None) as outrider:
        session, shapes = outrider.sessions["target"], list[tuple[int, ...]]()
        bind = session.bind

        def watched(buffers: Pass) -> Launch:
            shapes.append((*buffers.input_ids.shape, buffers.window))
            return bind(buffers)

        session.bind = watched  # type: ignore[method-assign]
        warm("target", session, [1, 2, 5], SILENT)
        assert sorted(shapes) == [(batch, rows, window) for batch in (1, 2) for rows in (1, 2, 5) for window in session.windows]
        assert all((values == 0).all() for values in session.cache().values())
