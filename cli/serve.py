"""`outrider serve`."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
from pathlib import Path

import click

from outrider.cli.options import device, number_or_auto
from outrider.engines.errors import FolderError, UsageError

KEYS = "OUTRIDER_API_KEYS"


class JsonLines(logging.Formatter):
    """A line of JSON for each record: its message, and what it was given besides."""

    usual = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}

    def format(self, record: logging.LogRecord) -> str:
        said = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        said |= {name: value for name, value in vars(record).items() if name not in self.usual}
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)


@click.command("serve")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen; 0.0.0.0 is everywhere.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 is any that is free.")
@click.option("--model-name", default="", help="The name that requests give.  [default: the target's]")
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help=f"Keys, one a line; requests must send one. Also from ${KEYS}, separated by commas.",
)
@click.option(
    "--k", default="auto", show_default=True, callback=number_or_auto, help="Draft tokens a round; see outrider generate."
)
@click.option("--drafter", type=click.Choice(["model", "ngram", "auto"]), help="Where drafted tokens come from.")
@click.option("--max-waiting", type=click.IntRange(min=0), default=64, show_default=True, help="Requests that may wait.")
@click.option("--max-choices", type=click.IntRange(min=1), default=16, show_default=True, help="Answers to one request.")
@click.option(
    "--max-prompt", type=click.IntRange(min=1), help="The longest prompt, in tokens.  [default: the bundle's capacity]"
)
@click.option("--max-body", type=click.IntRange(min=1), default=1 << 20, show_default=True, help="Bytes of a request.")
@click.option("--timeout", type=click.FloatRange(min=1), default=600.0, show_default=True, help="Seconds for an answer.")
@click.option(
    "--drain", type=click.IntRange(min=0), default=30, show_default=True, help="Seconds that answers have after SIGTERM."
)
@click.option("--log-prompts", is_flag=True, help="Put prompts into the log; by default no text of a request is.")
@device
def command(
    bundle: Path,
    host: str,
    port: int,
    model_name: str,
    api_key_file: Path | None,
    k: int | str,
    drafter: str | None,
    max_waiting: int,
    max_choices: int,
    max_prompt: int | None,
    max_body: int,
    timeout: float,
    drain: int,
    log_prompts: bool,
    device: str | None,
) -> None:
    """Answer HTTP requests as OpenAI's API does, many at once.

    As many requests share a round as the bundle was built for (build-engine --batch).
    """
    import uvicorn

    from outrider.engines.folder import read_manifest
    from outrider.runtime.generation import Outrider
    from outrider.runtime.scheduler import Scheduler
    from outrider.serve.app import Settings, create_app
    from outrider.serve.metrics import Metrics
    from outrider.serve.worker import Worker

    if read_manifest(bundle).build is None:  # what is wrong at once is said at once
        raise FolderError(f"{bundle} is an export, not a bundle", f"build it first: outrider build-engine {bundle} -o BUNDLE")
    settings = Settings(
        model=model_name,
        keys=_keys(api_key_file),
        most_bytes=max_body,
        most_choices=max_choices,
        most_prompt=max_prompt,
        log_prompts=log_prompts,
    )
    metrics = Metrics()

    def load() -> Scheduler:
        return Scheduler(Outrider.load(bundle, device=device, slots=None), most_waiting=max_waiting, k=k, drafter=drafter)

    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    worker = Worker(load, metrics, timeout)

    class Draining(uvicorn.Server):
        """Tells those whose answers have not ended in time to try again, where uvicorn would cut them off."""

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            asyncio.get_running_loop().call_later(drain, worker.end)
            await super().shutdown(sockets)

    config = uvicorn.Config(
        create_app(worker, metrics, settings),
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=drain + 5,
    )
    Draining(config).run()


def _keys(path: Path | None) -> tuple[str, ...]:
    """Those of the file and those of the environment."""
    keys = os.environ.get(KEYS, "").split(",")
    if KEYS in os.environ and not any(key.strip() for key in keys):
        raise UsageError(f"${KEYS} is set and has no key in it", "give keys, or unset it to let everyone in")
    if path is not None:
        try:
            keys += path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read {path}: {error}", "name a file with a key on each line") from error
        if not any(key.strip() for key in keys):
            raise UsageError(f"{path} has no key", "write one on a line of its own")
    return tuple(key.strip() for key in keys if key.strip())
