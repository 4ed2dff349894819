"""`outrider serve` as a process, with its memory, log size and metrics."""

from __future__ import annotations

import http.client
import re
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from outrider.errors import EngineError

GOOD_KEY, GREEDY_KEY = "key-of-the-good-clients", "key-of-the-greedy-client"


class Server:
    """A server that accepts two keys, on a free port of this machine."""

    def __init__(self, bundle: Path, *options: str):
        with tempfile.NamedTemporaryFile("w", suffix=".keys") as keys:
            keys.write(f"{GOOD_KEY}\n{GREEDY_KEY}\n")
            keys.flush()
            command = [Path(sys.executable).with_name("outrider"), "serve", bundle, "--port", "0", "--api-key-file", keys.name]
            self.process = subprocess.Popen([*map(str, command), *options], stderr=subprocess.PIPE, text=True)
            assert self.process.stderr is not None
            lines = []
            for line in self.process.stderr:
                lines.append(line)
                if (found := re.search(r"running on http://[\d.]+:(\d+)", line)) is not None:
                    break
            else:
                raise EngineError("outrider serve did not start", " ".join(["it said:", *lines[-2:]]))
        self.port = int(found[1])
        self.logged = 0  # bytes
        threading.Thread(target=self._read_log, daemon=True).start()
        while self.get("/health")[0] != 200:
            time.sleep(0.1)

    def _read_log(self) -> None:
        for line in self.process.stderr or ():
            self.logged += len(line)

    def get(self, path: str) -> tuple[int, str]:
        """Return the status and the text of a page."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path, headers={"Authorization": f"Bearer {GOOD_KEY}"})
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, text

    @property
    def memory(self) -> int:
        """The resident memory in bytes, plus the memory that only its children use."""
        process = psutil.Process(self.process.pid)
        own = int(process.memory_info().rss)
        for child in process.children(recursive=True):
            with suppress(psutil.Error):  # it may have ended
                own += int(child.memory_full_info().uss)
        return own

    def counters(self) -> dict[str, float]:
        """Return the metrics by name and labels."""
        lines = [line for line in self.get("/metrics")[1].splitlines() if not line.startswith("#")]
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}

    def stop(self) -> None:
        """End the server."""
        self.process.terminate()
        self.process.wait(60)
