"""The messages between the builder's two processes, one line of JSON each: a `Job`, and the `Report`s on it."""

from __future__ import annotations

import msgspec

from outrider.backends.tensorrt.options import BuildOptions
from outrider.backends.tensorrt.package import Package
from outrider.bundle.manifest import Profile
from outrider.engines.contract import CacheTensor

PROGRESS_PARTS = 1000  # of one engine's build


class Gpu(msgspec.Struct):
    """The first GPU."""

    name: str
    compute_capability: str
    free: int  # bytes


class EngineFacts(msgspec.Struct):
    """A package's release, and what it can build for."""

    version: str
    compute_capabilities: list[str]  # that it knows by name
    gpu: Gpu | None  # None for a package that builds without one


class BuildJob(msgspec.Struct):
    """One engine to build; without a graph, a request for the facts."""

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
    """A report of the child: its stage, its progress, and how it ended."""

    stage: str = ""
    done: int = 0  # further parts of `PROGRESS_PARTS`
    facts: EngineFacts | None = None
    missing: str = ""  # why the package cannot be imported
    error: str = ""
    errno: int = 0  # of an error while reading or writing a file
    finished: bool = False


class Refused(Exception):
    """The package refuses a graph, an option or a build; the message says which and why."""
