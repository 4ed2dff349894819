"""The messages between the builder's two processes, one line of JSON each: a `BuildJob`, and `BuildReport`s in return."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from outrider.backends.tensorrt.package import Package
from outrider.bundle.manifest import Profile
from outrider.engines.contract import CacheTensor
from outrider.errors import UsageError

PROGRESS_PARTS = 1000  # of one engine's build
VERBOSITIES = ("error", "warning", "info", "verbose")
MAX_OPTIMIZATION_LEVEL = 5


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """The checked options of a build."""

    compute_capability: tuple[str, ...] = ()  # empty is the package's default: all supported GPUs from 8.0 on
    workspace: float | None = None  # GiB of GPU memory that a kernel may use in addition to its inputs and outputs
    optimization_level: int | None = None
    verbosity: str | None = None  # one of `VERBOSITIES`
    timing_cache: str | None = None  # a file
    hardware_compatible: bool = False
    version_compatible: bool = False

    def __post_init__(self) -> None:
        """Raise `UsageError` if a value is out of range."""
        if self.workspace is not None and not 0 < self.workspace < 2**20:
            raise UsageError(f"a workspace of {self.workspace} GiB is out of range", "use --workspace 2, for example")
        if self.optimization_level is not None and not 0 <= self.optimization_level <= MAX_OPTIMIZATION_LEVEL:
            raise UsageError(
                f"there is no optimization level {self.optimization_level}",
                f"use --optimization-level 0 to {MAX_OPTIMIZATION_LEVEL}",
            )
        if self.verbosity not in (None, *VERBOSITIES):
            raise UsageError(f"there is no verbosity {self.verbosity!r}", f"use --verbosity {', '.join(VERBOSITIES)}")


class Gpu(msgspec.Struct):
    """The first GPU."""

    name: str
    compute_capability: str
    free: int  # bytes


class EngineFacts(msgspec.Struct):
    """A package's release, and the GPUs that it can build for."""

    version: str
    compute_capabilities: list[str]  # that the package has a name for
    gpu: Gpu | None  # None if there is none, or the package does not need one


class BuildJob(msgspec.Struct):
    """One engine to build. Without a graph, it is a request for the facts."""

    package: Package
    options: BuildOptions
    graph: str = ""
    plan: str = ""
    cache: list[CacheTensor] = []
    capacity: int = 0
    recent: int = 0  # rows that recurrent layers keep
    profiles: list[Profile] = []
    stream_weights: bool = False


class BuildReport(msgspec.Struct, omit_defaults=True):
    """A report of the child: its stage, its progress, and the outcome."""

    stage: str = ""
    done: int = 0  # more parts of `PROGRESS_PARTS`
    facts: EngineFacts | None = None
    missing: str = ""  # why the package cannot be imported
    error: str = ""
    errno: int = 0  # if reading or writing a file failed
    finished: bool = False


class Refused(Exception):
    """The package refuses a graph, an option or a build. The message says which, and why."""
