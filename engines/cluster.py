"""The Ray cluster that processes of this machine and others belong to."""

from __future__ import annotations

import os
from typing import Any

import ray

from outrider.errors import EngineError


def connect(cores: int | None = None) -> bool:
    """Connect to the cluster at `RAY_ADDRESS`, unless this process is part of one. Without an address, start one here.

    Args:
        cores: of a cluster that is started; None is those of this machine.

    Returns:
        whether a cluster was started, which ends with this process.

    Raises:
        EngineError: the cluster cannot be reached.
    """
    if ray.is_initialized():
        return False
    local = os.environ.get("RAY_ADDRESS", "") in ("", "local")
    started: dict[str, Any] = {"address": "local", "num_cpus": cores, "include_dashboard": False} if local else {}
    try:
        ray.init(**started, log_to_driver=False, logging_level="error")
    except ConnectionError as error:
        raise EngineError(f"no Ray cluster: {error}", "start one with ray start, or unset RAY_ADDRESS") from error
    return local
