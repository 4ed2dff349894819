"""`outrider serve`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import click

from outrider.commands.options import (
    NO_TEMPLATE,
    bundle_of,
    chat_template,
    device,
    drafter,
    memory_file,
    model,
    number_or_auto,
    stage_cores,
)
from outrider.errors import UsageError
from outrider.prepare.wanted import Wanted
from outrider.serve.network.access import KEYS, allowed_hosts, read_keys
from outrider.serve.network.signals import handle_signals


def minimum_and_maximum(_: click.Context, __: click.Parameter, text: str) -> tuple[int, int]:
    """Parse a number of replicas (click callback)."""
    parts = text.split(":")
    if not all(part.isdecimal() for part in parts) or len(parts) > 2 or not 1 <= int(parts[0]) <= int(parts[-1]):
        raise click.BadParameter(f"{text!r} is neither a number such as 2 nor a range such as 1:4")
    return int(parts[0]), int(parts[-1])


@click.command("serve")
@model
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 means all, and needs API keys."
)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port to listen on; 0 picks a free one."
)
@click.option("--model-name", default="", help="Name of the model in the API.  [default: the target's]")
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help=f"Require one of the API keys in this file, one per line. ${KEYS} may have more, separated by commas.",
)
@click.option("--no-auth", is_flag=True, help="Serve everyone who can reach --host, without API keys.")
@click.option(
    "--k", default="auto", show_default=True, callback=number_or_auto, help="Draft tokens per round; see outrider generate."
)
@drafter
@click.option(
    "--max-waiting", type=click.IntRange(min=0), default=64, show_default=True, help="Maximum number of waiting requests."
)
@click.option(
    "--max-choices", type=click.IntRange(min=1), default=16, show_default=True, help="Maximum number of choices per request."
)
@click.option("--max-prompt", type=click.IntRange(min=1), help="Maximum tokens of a prompt.  [default: the bundle's capacity]")
@click.option("--max-body", type=click.IntRange(min=1), default=1 << 20, show_default=True, help="Maximum bytes of a request.")
@click.option("--timeout", type=click.FloatRange(min=1), default=600.0, show_default=True, help="Maximum seconds per answer.")
@click.option(
    "--drain", type=click.IntRange(min=0), default=30, show_default=True, help="Seconds for answers to finish after a signal."
)
@click.option(
    "--share-prefixes",
    is_flag=True,
    help="Let all clients share cached prompt prefixes; by default only clients with the same key do.",
)
@click.option(
    "--memory-tokens",
    type=click.IntRange(min=0),
    default=1_000_000,
    show_default=True,
    help="Tokens of finished requests to remember and draft from, in equal shares for the clients; 0 remembers nothing.",
)
@memory_file
@click.option("--log-prompts", is_flag=True, help="Log prompts; by default no text of a request is logged.")
@chat_template
@click.option("--allow-special-tokens", is_flag=True, help="Parse special tokens in the text of chat messages.")
@click.option("--ray", is_flag=True, help="Run replicas in the Ray cluster at $RAY_ADDRESS, or in a local one.")
@click.option(
    "--replicas",
    default="1",
    show_default=True,
    callback=minimum_and_maximum,
    help="With --ray: number of replicas, or MIN:MAX to scale with the load.",
)
@click.option(
    "--cpus",
    type=click.IntRange(min=1),
    help="With --ray: cores per replica.  [default: as many as fit; 1 with a GPU or --stage-cores]",
)
@stage_cores
@device
def command(
    wanted: Wanted,
    host: str,
    port: int,
    model_name: str,
    api_key_file: Path | None,
    no_auth: bool,
    k: int | str,
    drafter: str | None,
    max_waiting: int,
    max_choices: int,
    max_prompt: int | None,
    max_body: int,
    timeout: float,
    drain: int,
    share_prefixes: bool,
    memory_tokens: int,
    memory_file: Path | None,
    log_prompts: bool,
    chat_template: str | None,
    allow_special_tokens: bool,
    ray: bool,
    replicas: tuple[int, int],
    cpus: int | None,
    stage_cores: int | None,
    device: str | None,
) -> None:
    """Serve a model over HTTP with OpenAI's API.

    MODEL is a bundle, or something to make one of: see outrider generate.

    Requests are batched, up to the maximum that the bundle was built for (build-engine --batch).
    """
    handle_signals(lambda *_: sys.exit(0))  # until the server installs its own handlers
    from outrider.bundle.folder import read_manifest
    from outrider.bundle.manifest import CHAT_TEMPLATE, is_cuda
    from outrider.serve.log import log_as_json
    from outrider.serve.network.connections import listen
    from outrider.serve.settings import Settings

    if not ray and (replicas != (1, 1) or cpus is not None):
        raise UsageError("--replicas and --cpus need --ray", "add --ray, or leave them out")
    if memory_file is not None and (ray or not memory_tokens):
        reason = "with --ray, each replica has a memory of its own" if ray else "--memory-tokens 0 remembers nothing"
        raise UsageError(f"--memory cannot be used: {reason}", "leave it out")
    if ray and port == 0:
        raise UsageError("all machines of a cluster listen on the same port", "choose one with --port")
    if ray:
        from outrider.serve.cluster import cluster
    else:
        from outrider.serve.network.server import HttpServer
    keys = read_keys(api_key_file)
    hosts = allowed_hosts(host, bool(keys), no_auth)
    if not ray:
        for listener in listen(host, port):  # a port in use should be noticed before a model is made
            listener.close()
    bundle = bundle_of(wanted, device, k, stage_cores).bundle
    manifest = read_manifest(bundle)
    build = manifest.build
    assert build is not None  # it is a bundle
    settings = Settings(
        bundle=bundle.resolve(),
        device=device,
        stage_cores=stage_cores,
        k=k,
        drafter=drafter,
        max_waiting=max_waiting,
        timeout=timeout,
        model=model_name,
        keys=keys,
        hosts=hosts,
        max_bytes=max_body,
        max_choices=max_choices,
        chat_template=chat_template,
        max_prompt=max_prompt,
        share_prefixes=share_prefixes,
        memory_tokens=memory_tokens,
        memory_file=memory_file,
        log_prompts=log_prompts,
        allow_special_tokens=allow_special_tokens,
    )
    server = None if ray else HttpServer(settings, host, port, drain)  # what it refuses is no line of a log
    log_as_json()
    if chat_template is None and CHAT_TEMPLATE not in manifest.files:
        logging.getLogger("outrider.serve").warning(NO_TEMPLATE)
    if server is not None:
        server.run()
        return
    places = [device or place for place in build.places]
    stages = [{"CPU": stage_cores} | ({"GPU": 1} if is_cuda(place) else {}) for place in places[:-1]] if stage_cores else []
    own = [*places[len(stages) :], "cpu" if device else build.draft_device or "cpu"]
    gpus = max(0 if place == "cpu" else 1 + int(place.partition(":")[2] or 0) for place in own)  # up to the last in use
    cpus = cpus or (1 if gpus or stage_cores else None)
    cluster.run(settings, cluster.Scale(replicas, build.batch, cpus, gpus, stages), host, port, drain)
