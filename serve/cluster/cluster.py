"""Replicas on many machines, as an application of Ray Serve.

Ray's proxy passes a request to an `Ingress`, which passes it to a `Replica` as ASGI messages. The replica answers it as
`outrider serve` without Ray does. Ray starts, places, scales, checks and replaces replicas. It queues and routes requests,
tracks sessions, streams answers, and cancels them when a client disconnects.

Three parts replace Ray's own. With Ray 2.60, a replica behind `serve.ingress` alone (tried with and without HAProxy) lacks what
they do:

- `Ingress` retries. When a replica is lost, Ray's proxy answers 500 and HAProxy closes the connection, even if nothing was sent
  yet and another replica is idle. A started stream is cut off without an error event. The error for a full queue is plain text.
- `ReplicaRegistry` has the health and metrics of all replicas. A scrape through Ray's proxy reaches only one of them, and
  `DeploymentHandle.broadcast` waits for a free place in each replica, so it hangs when metrics matter most.
- `Router` sends requests without a session to the less busy of two replicas, where Ray's experimental `ConsistentHashRouter`
  would choose one by a hash.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import random
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, ControllerOptions, HTTPOptions, RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from ray.serve.schema import ProxyStatus

from outrider.engines.cluster import connect
from outrider.errors import EngineError, UsageError, reason_of
from outrider.serve.cluster.ingress import Ingress
from outrider.serve.cluster.replica import HEALTH_CHECK_PERIOD, Replica, ReplicaRegistry
from outrider.serve.network.signals import handle_signals
from outrider.serve.settings import Settings

APPLICATION = "outrider"
PROXY_WAIT = 300  # seconds for a proxy to start; an idle machine takes 5, but a busy one took more than 60
# By default Ray's controller kills a proxy that is not ready within 5 seconds, although `serve.start` waits a minute for it.
CONTROLLER = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(PROXY_WAIT)}
INGRESSES = 2  # so that one remains if the other is lost
UPSCALE_DELAY = 10.0  # seconds that requests must wait before replicas are added; loading a bundle takes about as long
LOGGER = logging.getLogger("outrider.serve")


class Router(RequestRouter):  # type: ignore[misc]  # Ray's types are not checked
    """Routes all requests of a session to one replica while it has room, and others to the less busy of two random replicas.

    A session ranks replicas by a hash of both (rendezvous hashing, Thaler and Ravishankar 1998). So if a replica is added or
    removed, only that replica's sessions move.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return groups of replicas. The request goes to the least busy of the first group in which one has room."""
        session = ""
        if pending_request is not None:
            session = pending_request.metadata.session_id
            pending_request.routing_context.should_backoff = True  # wait if none has room; by default Ray retries immediately
        if not session:
            return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]

        def rank(replica: RunningReplica) -> bytes:
            return hashlib.sha256(f"{session} {replica.replica_id.unique_id}".encode()).digest()

        return [[each] for each in sorted(candidate_replicas, key=rank)]


@dataclass(frozen=True, slots=True)
class Scale:
    """The number of replicas, and the resources of each."""

    replicas: tuple[int, int]  # minimum and maximum; the number scales with the load
    slots: int  # requests that a replica runs at once
    cpus: int | None  # cores per replica; None is as many as possible with the maximum number of replicas
    gpus: int
    stages: Sequence[Mapping[str, int]] = ()  # resources of each stage of its target that runs in a process of its own


def application(settings: Settings, scale: Scale, cpus: int, drain: float) -> Any:
    """Return the application.

    Args:
        cpus: cores per replica.
        drain: seconds that a replica has to finish its answers before it ends.
    """
    minimum, maximum = scale.replicas
    number: dict[str, Any] = {"num_replicas": minimum}
    if minimum != maximum:
        number = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=minimum, max_replicas=maximum, target_ongoing_requests=scale.slots, upscale_delay_s=UPSCALE_DELAY
            )
        }
    if scale.stages:  # a replica gets room for all of its stages or waits: else two could take what one needs
        bundles = [{"CPU": cpus} | ({"GPU": scale.gpus} if scale.gpus else {}), *scale.stages]
        number |= {"placement_group_bundles": bundles, "placement_group_strategy": "SPREAD"}
    replica = serve.deployment(
        Replica,
        name="replica",
        ray_actor_options={"num_cpus": cpus, "num_gpus": scale.gpus},
        max_ongoing_requests=scale.slots + 1,  # the next request is ready when a slot becomes free
        max_queued_requests=-1,  # unlimited: each ingress limits the requests that it holds
        health_check_period_s=HEALTH_CHECK_PERIOD,
        request_router_config=RequestRouterConfig(request_router_class=Router),
        graceful_shutdown_timeout_s=drain,
        max_constructor_retry_count=2,
        **number,
    )
    registry = serve.deployment(
        ReplicaRegistry, name="registry", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=1000
    ).bind()
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="ingress",
        num_replicas=INGRESSES,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=10_000,  # in effect unlimited: the ingress has its own limit
        graceful_shutdown_timeout_s=drain + 10,  # longer than a replica's, to report which answers were cut off
    )
    places = maximum * scale.slots + settings.max_waiting
    return ingress.bind(settings, replica.bind(settings, registry), registry, places)


def max_cores(replicas: int) -> int:
    """Return the maximum number of cores for each of `replicas` replicas on the cluster's nodes; 0 if they do not fit."""
    nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    sizes = [cores for cores in range(1, max(nodes, default=0) + 1) if sum(node // cores for node in nodes) >= replicas]
    return max(sizes, default=0)


def run(settings: Settings, scale: Scale, host: str, port: int, drain: int) -> None:
    """Deploy the application to the cluster at `RAY_ADDRESS`, and return when it is ready.

    It replaces an earlier deployment, whose replicas answer until then. Without `RAY_ADDRESS`, start a cluster on this machine,
    and run until SIGTERM.

    Raises:
        EngineError: the cluster cannot be reached, or the replicas do not start.
        UsageError: there are too few cores.
    """
    local = connect()
    try:
        available, replicas, cpus = max_cores(scale.replicas[1]), scale.replicas[1], scale.cpus or 1
        staged = sum(each["CPU"] for each in scale.stages)
        each = f"{cpus}" + (f" and {staged} for stages" if staged else "")
        if local and (cpus > available or (staged and replicas * (cpus + staged) > max_cores(1))):  # another cluster may grow
            raise UsageError(
                f"this machine has too few cores for {replicas} replicas with {each} each", "ask for fewer, or set RAY_ADDRESS"
            )
        gpus = replicas * (scale.gpus + sum(each.get("GPU", 0) for each in scale.stages))
        if local and gpus > (known := int(ray.cluster_resources().get("GPU", 0))):
            hint = "ask for fewer replicas or set RAY_ADDRESS; with --stage-device cuda,cuda, each stage takes one"
            raise UsageError(f"this machine has {known} GPUs, and {replicas} replicas take {gpus}", hint)
        try:
            _start_proxies(host, port)
        except (RayError, TimeoutError) as error:
            raise EngineError(
                f"the proxies do not start: {reason_of(error)}", "see Ray's logs, and check that the port is free on all nodes"
            ) from error
        try:
            serve.run(application(settings, scale, scale.cpus or available or 1, drain), name=APPLICATION)
        except RuntimeError as error:
            raise EngineError(f"the replicas do not start: {error}", "see serve status, and the replicas' logs") from error
        LOGGER.info(f"running on http://{host}:{port}", extra={"replicas": scale.replicas})
        if local:
            _wait_for_signal()
            _finish(drain)
            serve.shutdown()
    finally:
        ray.shutdown()


def _start_proxies(host: str, port: int) -> None:
    deadline = time.monotonic() + PROXY_WAIT
    try:
        serve.start(
            proxy_location="EveryNode",
            http_options=HTTPOptions(host=host, port=port),
            controller_options=ControllerOptions(runtime_env={"env_vars": CONTROLLER}),
        )
    except TimeoutError:  # after a minute, which no option of Ray can change; the proxies are still starting
        while set(states := serve.status().proxies.values()) != {ProxyStatus.HEALTHY}:
            if ProxyStatus.UNHEALTHY in states or time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def _wait_for_signal() -> None:
    ended = threading.Event()
    handle_signals(lambda *_: ended.set())
    ended.wait()


def _finish(drain: float) -> None:
    """Let answers finish, for at most `drain` seconds or until a SIGINT. `serve.shutdown` alone would cut them off."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(TimeoutError, KeyboardInterrupt, RayError):
        serve.get_app_handle(APPLICATION).broadcast("finish").results(timeout_s=drain)
        serve.delete(APPLICATION)  # its processes end when what they have sent has arrived
