"""llama.cpp through its server, with the GGUF files: plain, with the draft model, and with n-grams of the text.

`llama-server` must be in the PATH. It comes from a package, or is built from source, which is in the sdist of llama-cpp-python.
"""

from __future__ import annotations

import atexit
import json
import shutil
import socket
import subprocess
import time
from http.client import HTTPConnection
from pathlib import Path

from outrider.experiments.compare_cpu.common import CONTEXT, THREADS, AnswerFunction, Arrivals, Job, PairFiles

NAME, WEIGHTS, SERVER = "llama.cpp", "the GGUF files", "llama-server"
# By default, llama.cpp looks up 24 tokens and drafts 48, which is too long for short answers.
LOOKUP = "lookup 3"
LOOKUP_OPTIONS = ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "3"]
# One process for each k, because a server supports only one kind of drafting.
SETTINGS: list[Job] = [{"threads": THREADS, "k": [k]} for k in (0, 1, 2, 3, 4, LOOKUP)]


def version() -> str | None:
    """Return the version of the server, or None if there is none."""
    if shutil.which(SERVER) is None:
        return None
    done = subprocess.run([SERVER, "--version"], capture_output=True, text=True, check=True)
    return next(line.removeprefix("version: ") for line in (done.stdout + done.stderr).splitlines() if "version: " in line)


def prepare(folder: Path, pair: PairFiles) -> Job:
    """Do nothing: the GGUF files run as they are."""
    return {role: str(file) for role, file in pair._asdict().items()}


def load(job: Job) -> AnswerFunction:
    """Start a server for the job's only k, and wait until it answers."""
    (k,) = job["k"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [SERVER, "-m", job["target"], "-c", CONTEXT, "-np", 1, "--port", port, "--no-webui"]
    command += ["-t", job["threads"], "-tb", job["threads"]]
    if k == LOOKUP:
        command += LOOKUP_OPTIONS
    elif k != 0:
        command += ["-md", job["draft"], "--spec-type", "draft-simple", "--spec-draft-n-max", k]
    server = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    atexit.register(server.kill)
    while not _is_ready(port):
        if server.poll() is not None:
            raise RuntimeError(f"{SERVER} ended with {server.returncode}: {command}")
        time.sleep(0.2)

    def answer(ids: list[int], tokens: int, k: int | str) -> tuple[Arrivals, float | None]:
        body = {"prompt": ids, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False, "stream": True}
        connection = HTTPConnection("127.0.0.1", port)
        timings: dict[str, int] = {}
        started, arrivals = time.perf_counter(), list[tuple[float, int]]()
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{SERVER} answered {response.status}: {response.read()[:500]!r}")
        for line in response:
            if line.startswith(b"data: "):
                event = json.loads(line.removeprefix(b"data: "))
                timings = event.get("timings", timings)
                if event["tokens"]:
                    arrivals.append((time.perf_counter() - started, len(event["tokens"])))
        connection.close()
        if sum(count for _, count in arrivals) != tokens:
            raise RuntimeError(f"{SERVER} answered {arrivals} instead of {tokens} tokens")
        return arrivals, tokens / max(tokens - timings.get("draft_n_accepted", 0), 1)

    return answer


def _is_ready(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except ConnectionError:
        return False
    finally:
        connection.close()
