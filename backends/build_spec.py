"""What `build-engine` asks of a backend."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from outrider.bundle.integrity import check_files
from outrider.bundle.manifest import Build, Manifest, graph_files
from outrider.engines.contract import Stage, StageBackend, window_buckets
from outrider.errors import FolderError
from outrider.progress import Progress

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True, slots=True)
class BuildSpec:
    """The arguments of `build-engine`, checked against the models."""

    source: Path  # the export
    manifest: Manifest  # of the export
    output: Path  # the bundle, for messages only: it is written under another name first
    k: list[int]  # ascending
    capacity: int
    batch: int
    max_prompt_chunk: int
    device: str | None = None  # one of the backend's `devices`
    options: Mapping[str, Any] = field(default_factory=dict)  # the given ones of the backend's `options`
    ends: Sequence[int] = ()  # of the target's stages, each as a number of layers; empty if it is not cut
    parts: Sequence[ir.Model] = ()  # their graphs
    stage_devices: Sequence[str] = ()  # of the stages; empty if all are on `device`
    stage_threads: Sequence[int | None] = ()  # of the stages; empty if none has a number
    draft_device: str | None = None  # of draft models, if it is not that of the last stage
    stage_backends: Sequence[str] = ()  # of the stages; empty if all have the bundle's

    def result(self, backend: str, version: str, device: str, **fields: Any) -> Build:
        """Return the manifest's `Build`, without measurements.

        Args:
            backend: its name.
            version: the release of its package.
            device: the device that the engines are built on or for.
            fields: more fields of `Build`.
        """
        return Build(
            backend=backend,
            backend_version=version,
            device=device,
            k=self.k,
            capacity=self.capacity,
            batch=self.batch,
            max_prompt_chunk=self.max_prompt_chunk,
            windows=window_buckets(self.capacity),
            draft_device=self.draft_device,
            **fields,
        )

    def stages(self, device: str) -> list[Stage]:
        """Return the stages of the target for a device; empty if it is not cut.

        Stages of another backend than the last one's have its name and no more; see `Backend.build_stages`.
        """
        if not self.ends:
            return []
        from outrider.backends.rewriting.parts import stages_of

        stages = stages_of(self.parts, self.ends, self.stage_devices or [device])
        threads, names = self.stage_threads or [None] * len(stages), self.stage_backends or [""] * len(stages)
        others = [StageBackend(name, "") if name != names[-1] else None for name in names]
        return [
            msgspec.structs.replace(stage, threads=count, backend=other)
            for stage, count, other in zip(stages, threads, others, strict=True)
        ]

    def copy_except(self, engines: Iterable[str], folder: Path, progress: Progress, *, growth: int = 1) -> None:
        """Check every file of the export, and copy into `folder` all but the files of these `ENGINES`.

        Args:
            growth: the size of the whole bundle as a multiple of the export's, so that a full disk is reported before minutes
                of work.

        Raises:
            FolderError: the export is damaged, or the disk has too little room.
        """
        check_files(self.source, self.manifest, progress)
        built = {file for name in engines for file in graph_files(name)}
        size = growth * sum(entry.size for entry in self.manifest.files.values())
        free = shutil.disk_usage(folder).free
        if size > free:
            raise FolderError(
                f"no room to write {self.output}: it takes {size:,} bytes, and {free:,} are free", "free some disk space"
            )
        entries = {name: entry for name, entry in self.manifest.files.items() if name not in built}
        progress.stage("copying from the export", sum(entry.size for entry in entries.values()))
        for name, entry in entries.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.source / name, folder / name)
            progress.advance(entry.size)
