"""Replaces stages of the target that run in other processes, after one of them has failed."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

from outrider.errors import OutriderError, StageError
from outrider.runtime.request import Event, Request
from outrider.runtime.scheduler import Scheduler
from outrider.serve.watchdog import bug, warm_up

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 15.0  # seconds after a failed attempt, twice as long each time
LOOKING = 1.0  # seconds between two looks for lost stages while nothing runs
LOGGER = logging.getLogger("outrider.serve")


def lost_stage(results: Sequence[tuple[Request, Event | OutriderError]]) -> StageError | None:
    """Return the error of a step in which a stage failed."""
    return next((result for _, result in results if isinstance(result, StageError)), None)


def look_for_lost_stages(scheduler: Scheduler) -> None:
    """Note whether a stage has failed while nothing ran, so that no request has to find out."""
    try:
        scheduler.bundle.sessions["target"].check()
    except StageError as error:
        scheduler.lost = error


def replace_stages(scheduler: Scheduler) -> Iterator[OutriderError]:
    """Connect new stages, and answer a probe over them. Yield the error of each attempt that fails. The caches of all slots are
    empty afterwards."""
    pause = FIRST_PAUSE
    while True:
        try:
            scheduler.reset()  # first, because rounds that have begun belong to the old stages
            scheduler.bundle.sessions["target"].reopen()
            warm_up(scheduler)
        except BaseException as error:  # or a panic of a library in Rust
            LOGGER.warning("the stages cannot be replaced yet", extra={"error": str(error), "pause": pause})
            yield error if isinstance(error, OutriderError) else bug(error)
        else:
            LOGGER.info("the stages have been replaced")
            return
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
