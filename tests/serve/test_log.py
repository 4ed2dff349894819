"""A log that nobody reads holds up nothing."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import subprocess
import threading
from contextlib import ExitStack
from pathlib import Path

from outrider.serve.log import HELD_BYTES, LineWriter
from outrider.tests.serve.server import Reached, chat_bundle, fetch
from outrider.tests.support import COMMAND


def test_what_does_not_fit_is_dropped_and_counted() -> None:
    reading, writing = os.pipe()
    logger, handler = logging.Logger("test"), LineWriter(writing)
    logger.addHandler(handler)
    size = 10_000
    sent = 2 * HELD_BYTES // size
    for number in range(sent):
        logger.info("answered", extra={"number": number, "text": "x" * size})

    lines: list[dict[str, str | int]] = []
    with os.fdopen(reading) as pipe:
        reader = threading.Thread(target=lambda: lines.extend(map(json.loads, pipe)))
        reader.start()
        handler.flush()
        logger.info("after")
        handler.flush()
        os.close(writing)
        reader.join()
    *kept, last = lines
    assert HELD_BYTES // 2 < len(kept) * size < HELD_BYTES * 1.1
    numbers = [int(line["number"]) for line in kept]
    assert numbers == sorted({*numbers})  # on a busy machine, some of the later ones fit again
    assert last["message"] == "after"
    assert sum(int(line.get("lost_before", 0)) for line in lines) == sent - len(kept)


def test_a_server_whose_log_nobody_reads_answers_and_ends(trained_export: Path, tmp_path: Path) -> None:
    command = [*COMMAND, "serve", str(chat_bundle(trained_export, tmp_path / "bundle")), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process, ExitStack() as stack:
        stack.callback(process.kill)
        assert process.stderr is not None
        fcntl.fcntl(process.stderr, fcntl.F_SETPIPE_SZ, 4096)
        server = Reached()
        for line in process.stderr:
            if "running on" in (message := json.loads(line)["message"]):
                server.url = message.split("running on ")[1]
                break
        server.ready()
        for _ in range(40):
            assert fetch(f"{server.url}/v1/completions", b'{"prompt": "x", "max_tokens": 1}')[0] == 200
        assert server.health()[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
