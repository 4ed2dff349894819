"""The threads of ONNX Runtime's sessions: one pool for all of a process, or one for each."""

from __future__ import annotations

from typing import Any

import onnxruntime

from outrider.engines.threads import thread_count

_shared: bool | None = None  # whether all sessions of this process have one thread pool; None before the first one


def create_pool(threads: int, shared: bool = True) -> bool:
    """Create the thread pool that all sessions of this process share or, if it is not `shared`, let each have its own.

    Draft and target take turns. If each had a spinning pool, they would compete for the cores. ONNX Runtime has one shared pool
    per process, which cannot be replaced, and then refuses sessions that ask for their own pool. So the first call decides.

    Returns:
        Whether they share one.
    """
    global _shared
    if _shared is None:
        _shared = shared
        if shared:
            onnxruntime.set_global_thread_pool_sizes(threads, 1)
    return _shared


def session_options(threads: int | None = None) -> Any:
    """Return new session options that use the shared pool or, without one, a pool of at most `threads`."""
    options = onnxruntime.SessionOptions()
    if create_pool(thread_count()):
        options.use_per_session_threads = False
    else:
        options.intra_op_num_threads = min(threads or thread_count(), thread_count())
        options.add_session_config_entry("session.force_spinning_stop", "1")  # at the end of a run, for the other pools
    return options
