"""What TensorRT adds to the options of `build-engine`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.backends.base import Option
from outrider.backends.tensorrt.package import RTX_GPUS
from outrider.errors import UsageError

VERBOSITIES = ("error", "warning", "info", "verbose")
MAX_OPTIMIZATION_LEVEL = 5

SHARED = (
    Option("workspace", "GPU memory that one kernel may use for itself.", type=float, metavar="GIB"),
    Option(
        "optimization_level",
        "How long to search for faster kernels, 0 to 5.  [default: the package's, 3]",
        type=int,
        metavar="LEVEL",
    ),
    Option("verbosity", "Show TensorRT's own log on standard error, from this severity on.", choices=VERBOSITIES),
)
RTX_OPTIONS = (
    Option(
        "compute_capability",
        f"The GPUs to build for, such as 8.9,12.0: of {RTX_GPUS}.  [default: all of these from 8.0 on]",
        type=tuple,
        metavar="LIST",
    ),
    *SHARED,
)
TENSORRT_OPTIONS = (
    *SHARED,
    Option("timing_cache", "Timings of earlier builds: read, and written back.", type=Path, metavar="FILE"),
    Option("hardware_compatible", "Build engines that also run on other GPUs, from Ampere on.", type=bool),
    Option("version_compatible", "Build engines that newer releases of TensorRT run, too.", type=bool),
)


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """The checked options of a build."""

    compute_capability: tuple[str, ...] = ()  # empty is what the package chooses: all that it runs on, from 8.0 on
    workspace: float | None = None  # GiB of GPU memory that a kernel may use besides its inputs and outputs
    optimization_level: int | None = None
    verbosity: str | None = None  # of `VERBOSITIES`
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
