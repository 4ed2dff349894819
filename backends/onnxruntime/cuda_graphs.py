"""Runs that ONNX Runtime records as CUDA graphs, where a replay computes what the run did.

ONNX Runtime launches each node by itself, so a small model's pass takes as long as the host needs for the launches. It can
record a run with fixed buffers, and replay it as one launch. A recording keeps the addresses of everything that the run read,
so each is compared with the run itself before it is used.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import onnxruntime

from outrider.engines.device import Buffer, Device, Launch
from outrider.errors import OutriderWarning

GRAPH_ID = "gpu_graph_id"
NO_GRAPH = -1  # as the id of a run: it is neither recorded nor replayed
RECORD_AT = 3  # launches after which a run is recorded: it runs four times then, and many are never seen again
MAX_RECORDED = 64  # runs of a session


def run_options(graph: int | None) -> Any:
    """Return options of a run on CUDA that does not wait for its end.

    Args:
        graph: the run's id, `NO_GRAPH`, or None in a session that records nothing.
    """
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    if graph is not None:
        options.add_run_config_entry(GRAPH_ID, str(graph))
    return options


class CudaGraphs:
    """The recorded runs of a session."""

    def __init__(self, session: Any, device: Device):
        """Record runs of `session` on `device`."""
        self._session = session
        self._device = device
        self._plain = run_options(NO_GRAPH)
        self._ids = itertools.count(1)
        self._recorded = 0

    def launch(self, binding: Any, outputs: Sequence[Buffer]) -> Launch:
        """Return a launch of the session with a binding, which is recorded at its third time.

        Args:
            outputs: what a replay has to compute as the run did, to the bit.
        """
        options, launches = self._plain, 0

        def launch() -> None:
            nonlocal options, launches
            launches += 1
            self._session.run_with_iobinding(binding, options)
            if launches == RECORD_AT and self._recorded < MAX_RECORDED:
                options = self._record(binding, outputs)

        return launch

    def _record(self, binding: Any, outputs: Sequence[Buffer]) -> Any:
        """Record a run that has just been launched, and return the options of the runs that follow."""
        expected = [self._device.read(each).tobytes() for each in outputs]
        graph = next(self._ids)
        options = run_options(graph)
        try:
            for _ in range(2):  # the first records, and may replay; the second replays
                self._session.run_with_iobinding(binding, options)
                if [self._device.read(each).tobytes() for each in outputs] != expected:
                    raise ValueError("a replay computed something else")
        except Exception as error:  # ONNX Runtime's have no other base
            reason = str(error).strip().splitlines()[0]
            warnings.warn(f"a pass runs as plain launches: {reason}", OutriderWarning, stacklevel=2)
            self._session.run_with_iobinding(binding, self._plain)
            return self._plain
        self._recorded += 1
        weakref.finalize(binding, self._release, graph)
        return options

    def _release(self, graph: int) -> None:
        self._recorded -= 1
        self._session.release_captured_graph(graph)
