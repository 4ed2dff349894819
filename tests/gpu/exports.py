"""Exports and bundles for the tests that need a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from outrider.export.pair import export_pair
from outrider.tests.support import SHIPPED, run

SECONDS = 500  # of a command: a test may run two of them within its limit
TARGET, DRAFT = (str(SHIPPED / role) for role in ("target", "draft"))
EXPORTS: dict[str, Callable[[Path], object]] = {
    **{precision: partial(export_pair, TARGET, DRAFT, precision=precision) for precision in ("fp16", "fp32", "bf16", "int4")},
    "alone": partial(export_pair, TARGET, None, precision="fp16"),
}
"""The shipped pair in each precision, and its target alone."""


def command(*arguments: str | Path, timeout: float = SECONDS) -> str:
    """Run a command, and return its output."""
    done = run(*arguments, timeout=timeout)
    assert done.returncode == 0, f"outrider {arguments[0]} ended with {done.returncode}: {(done.stderr + done.stdout)[-600:]}"
    return done.stdout


def build(source: Path, bundle: Path, backend: dict[str, Any], *options: str, timeout: float = SECONDS) -> None:
    """Build a bundle by the command, which measures its costs."""
    chosen = [argument for name, value in backend.items() for argument in (f"--{name}", value)]
    command("build-engine", source, "-o", bundle, *chosen, "--k", "1,2,4,8", *options, timeout=timeout)
