"""Runs that ONNX Runtime records as CUDA graphs, if the replay computes the same.

ONNX Runtime launches each node separately, so the launches determine the time of a small model's pass. It can record a run
with fixed buffers, and replay it as one launch. A recording keeps the addresses of everything that the run read, so a replay
is compared with the run before it is used.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import onnxruntime

from outrider.backends.onnxruntime.package import first_line
from outrider.engines.device import Buffer, Device, Launch
from outrider.errors import OutriderWarning

GRAPH_ID = "gpu_graph_id"
NO_GRAPH = -1  # id of a run that is neither recorded nor replayed
RECORD_AT = 3  # launches before a run is recorded: recording takes more runs, and many runs never come again
MAX_RECORDED = 64  # recorded runs per session


def run_options(graph: int) -> Any:
    """Return options for a run on CUDA that returns without waiting.

    Args:
        graph: the run's id, or `NO_GRAPH`.
    """
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
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
        """Return a launch of the session with a binding. It is recorded at its third run.

        Args:
            outputs: the tensors that a replay must compute to the same bits.
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
        """Record a run that has just been launched, and return the options for later runs."""
        expected = [self._device.read(each).tobytes() for each in outputs]
        graph = next(self._ids)
        options = run_options(graph)
        try:
            for _ in range(2):  # the first records, and may replay; the second replays
                self._session.run_with_iobinding(binding, options)
                if [self._device.read(each).tobytes() for each in outputs] != expected:
                    raise ValueError("a replay computed different results")
        except Exception as error:  # ONNX Runtime's exceptions have no other base
            warnings.warn(f"a pass runs as plain launches: {first_line(error)}", OutriderWarning, stacklevel=2)
            self._session.run_with_iobinding(binding, self._plain)
            return self._plain
        self._recorded += 1
        weakref.finalize(binding, self._release, graph)
        return options

    def _release(self, graph: int) -> None:
        self._recorded -= 1
        self._session.release_captured_graph(graph)
