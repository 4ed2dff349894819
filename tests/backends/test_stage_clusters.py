"""Stages of a process that leaves its cluster and joins another one."""

from __future__ import annotations

import numpy as np
import pytest
import ray

from outrider.backends.stage_chain import Chain
from outrider.backends.stage_host import Crossing
from outrider.tests.nodes import WHOLE, Stage, ray_nodes

pytestmark = pytest.mark.slow


def chain() -> Chain:
    made = Chain({"stage 1": ray.remote(num_cpus=1)(Stage).remote()}, 20)
    made.open()
    return made


def test_stages_of_an_earlier_cluster_have_ended_with_it() -> None:
    """What is left of them in this process says nothing, and is in no way of the new ones."""
    with ray_nodes(1, 0):
        earlier = chain()
    with ray_nodes(1, 0):
        later = chain()
        earlier.close()
        message = Crossing((), np.zeros((1, 1), dtype=np.int64), np.zeros(1, dtype=np.int64), 0, 1, ())
        np.testing.assert_array_equal(later.receive(later.send(message))[0], WHOLE[:1] + 1)
