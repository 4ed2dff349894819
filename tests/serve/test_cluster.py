"""Replicas in a real Ray cluster of two nodes, which answer as one server; also when one dies or is replaced."""

from __future__ import annotations

import itertools
import json
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from ray.cluster_utils import Cluster

from outrider import Outrider, SamplingParams
from outrider.tests.serve.server import fetch, free_port
from outrider.tests.support import COMMAND, run

pytestmark = pytest.mark.slow  # tests/serve/test_ingress.py has what the ingress and the router decide, in process
PROMPTS = [f"Customer: I need a {what}." for what in ("flight", "taxi", "table", "room", "film", "doctor", "train", "band")]
TOKENS = 80
# On a busy machine, proxies take longer than Ray waits for them.
SHORT = "from ray.serve._private import api; api.HTTP_PROXY_TIMEOUT = 0.1"
BUSY = [sys.executable, "-c", f"{SHORT}; from outrider.cli import main; main()"]


class Served:
    """An application at a port of its own."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def replicas(self) -> set[str]:
        """Return the names of the replicas in the metrics."""
        *_, metrics = fetch(f"{self.url}/metrics")
        return set(re.findall(r'replica="(.+?)"', metrics.decode()))

    def wait_for_replicas(self, number: int | None, without: frozenset[str] = frozenset()) -> set[str]:
        """Wait until this number of replicas (None: any) are healthy, and none of `without` is."""
        for _ in range(240):
            replicas = self.replicas()
            if (len(replicas) == number if number else replicas) and not replicas & without:
                return replicas
            time.sleep(0.5)
        raise AssertionError(f"the replicas are {replicas}, not {number}")


class Deployed(Served):
    """One that `outrider serve --ray` has deployed to a cluster."""

    def __init__(self, cluster: Cluster):
        super().__init__()
        self.cluster = cluster

    def deploy(self, bundle: Path, *options: str, command: list[str] = COMMAND) -> None:
        command = [*command, "serve", str(bundle), "--ray", "--port", str(self.port), "--drain", "60", *options]
        done = subprocess.run(
            command, env={**os.environ, "RAY_ADDRESS": self.cluster.address}, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def texts(bundle: Path) -> dict[str, str]:
    """The answer to each prompt alone."""
    with Outrider.load(bundle) as outrider:
        params = SamplingParams(max_new_tokens=TOKENS, temperature=0)
        return {prompt: "".join(event.text for event in outrider.generate(prompt, params, k=0)) for prompt in PROMPTS}


@pytest.fixture(scope="module")
def deployed(bundle: Path) -> Iterator[Deployed]:
    """Two replicas on two nodes."""
    node = {"num_cpus": 1, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    try:
        cluster.add_node(**node)
        cluster.wait_for_nodes()
        deployed = Deployed(cluster)
        # With 8 slots, there are 16 places at each ingress.
        deployed.deploy(bundle, "--replicas", "2", "--max-waiting", "8", command=BUSY)
        deployed.wait_for_replicas(2)
        yield deployed
    finally:
        cluster.shutdown()


def ask(deployed: Served, prompt: str, stream: bool) -> tuple[str, bool]:
    """Return the text, and whether it is complete; if not, the error asked for a retry."""
    body: dict[str, Any] = {"model": "target", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    text = ""
    with openai.OpenAI(base_url=f"{deployed.url}/v1", api_key="-", max_retries=0, timeout=60) as client:
        try:
            if not stream:
                return client.completions.create(**body).choices[0].text, True
            for chunk in client.completions.create(**body, stream=True):
                text += chunk.choices[0].text
                if chunk.choices[0].finish_reason is not None:
                    return text, True
            raise AssertionError("the stream ended without a reason and without an error")
        except openai.APIStatusError as error:
            if error.status_code not in (429, 503) or error.response.headers["retry-after"] != "1":
                raise
        except openai.APIError as error:  # in a stream that has begun
            if "try again" not in str(error):
                raise
    return text, False


@contextmanager
def clients(deployed: Served, texts: dict[str, str]) -> Iterator[list[bool]]:
    """Run six clients that check their answers, and yield a growing list with whether each answer was complete."""
    ended = threading.Event()
    complete: list[bool] = []

    def client(number: int) -> None:
        for at in itertools.count(number):
            if ended.is_set():
                return
            prompt = PROMPTS[at % len(PROMPTS)]
            text, whole = ask(deployed, prompt, stream=number % 2 == 0)
            assert text == texts[prompt] if whole else texts[prompt].startswith(text), (prompt, text)
            complete.append(whole)

    with ThreadPoolExecutor(6) as pool:
        running = [pool.submit(client, number) for number in range(6)]
        try:
            yield complete
        finally:
            ended.set()
        for each in running:
            each.result(timeout=120)


def wait_for(more: int, complete: list[bool]) -> None:
    """Wait for this many more answers."""
    until = len(complete) + more
    for _ in range(1200):
        if len(complete) >= until:
            return
        time.sleep(0.1)
    raise AssertionError(f"{len(complete)} of {until} answers came")


def test_replicas_answer_as_one_server(deployed: Deployed, texts: dict[str, str]) -> None:
    with ThreadPoolExecutor(8) as pool:
        complete = list(pool.map(lambda prompt: ask(deployed, prompt, stream=len(prompt) % 2 == 0), PROMPTS))
    assert complete == [(texts[prompt], True) for prompt in PROMPTS]
    status, headers, _ = fetch(f"{deployed.url}/")
    assert (status, "Content-Security-Policy" in headers) == (200, True)
    status, _, answer = fetch(f"{deployed.url}/health")
    assert (status, json.loads(answer)["status"]) == (200, "ok")
    status, _, answer = fetch(f"{deployed.url}/v1/completions", b'{"prompt": "a", "echo": true}')
    assert (status, json.loads(answer)["error"]["param"]) == (400, "echo")
    status, _, answer = fetch(f"{deployed.url}/v1/completions", b" " * (2 << 20))
    assert (status, json.loads(answer)["error"]["code"]) == (413, "body_too_large")


def test_one_client_cannot_fill_the_queue(deployed: Deployed) -> None:
    """Without keys, each address has a share."""
    body = json.dumps({"prompt": PROMPTS[0], "max_tokens": 200, "min_tokens": 200}).encode()

    def status(address: str) -> int:
        connection = HTTPConnection("127.0.0.1", deployed.port, source_address=(address, 0))
        with closing(connection):
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            return connection.getresponse().status

    with ThreadPoolExecutor(44) as pool:
        greedy = [pool.submit(status, "127.0.0.1") for _ in range(40)]
        time.sleep(1)
        assert list(pool.map(status, ["127.0.0.2"] * 4)) == [200] * 4
        assert {each.result() for each in greedy} == {200, 429}
    lines = "POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {len(body)}"
    with ExitStack() as stack:  # a body that does not come has a place, too; without one, it is not waited for
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", deployed.port))) for _ in range(40)]
        for each in slow:
            each.sendall("\r\n".join([*lines, "", ""]).encode())
        for _ in range(50):
            answered = select.select(slow, [], [], 0)[0]
            if len(answered) >= 24:  # an address alone may have half of the places of both, or of one if all come to that
                break
            time.sleep(0.1)
        assert {each.recv(12) for each in answered} == {b"HTTP/1.1 429"}
        assert 24 <= len(answered) <= 32
        assert status("127.0.0.2") == 200
    for _ in range(100):  # until all places that the bodies had are free again, at both ingresses
        if [status("127.0.0.1") for _ in range(4)] == [200] * 4:
            return
        time.sleep(0.1)
    raise AssertionError("the places of clients that have left are not free")


def test_a_session_stays_on_its_replica(deployed: Deployed) -> None:
    def replica(session: str) -> str:
        body = json.dumps({"prompt": PROMPTS[0], "max_tokens": 2}).encode()
        return fetch(f"{deployed.url}/v1/completions", body, **{"X-Session-ID": session})[1]["x-replica"]

    seen = {session: {replica(session) for _ in range(3)} for session in map(str, range(10))}
    assert all(len(where) == 1 for where in seen.values()), seen
    assert len(set.union(*seen.values())) == 2, seen


def test_a_disconnect_cancels_the_answer(deployed: Deployed) -> None:
    def cancelled() -> float:
        metrics = fetch(f"{deployed.url}/metrics")[2].decode()
        return sum(float(each) for each in re.findall(r'requests_total{finish_reason="cancelled".*?} (.+)', metrics))

    before = cancelled()
    with openai.OpenAI(base_url=f"{deployed.url}/v1", api_key="-") as client:
        stream = client.completions.create(model="target", prompt=PROMPTS[0], max_tokens=450, stream=True)
        next(iter(stream))
        stream.close()
    for _ in range(60):
        if cancelled() == before + 1:
            return
        time.sleep(0.5)
    raise AssertionError("the answer was not cancelled")


def test_a_replica_dies_under_load(deployed: Deployed, texts: dict[str, str]) -> None:
    before = deployed.wait_for_replicas(2)
    with clients(deployed, texts) as complete:
        wait_for(8, complete)
        name = "ray::ServeReplica:outrider:replica"
        processes = psutil.process_iter(["cmdline"])
        next(each for each in processes if " ".join(each.info["cmdline"] or ()).startswith(name)).kill()
        wait_for(24, complete)
    assert complete.count(False) <= 8
    for _ in range(60):  # the lost replica is forgotten after a while
        if len(before & deployed.wait_for_replicas(2)) == 1:
            return
        time.sleep(0.5)
    raise AssertionError("the replica was not replaced")


def test_a_bundle_is_replaced_under_load(deployed: Deployed, bundle: Path, texts: dict[str, str], tmp_path: Path) -> None:
    shutil.copytree(bundle, tmp_path / "next")
    before = deployed.wait_for_replicas(2)
    with clients(deployed, texts) as complete:
        wait_for(8, complete)
        deployed.deploy(tmp_path / "next", "--replicas", "1:2", "--max-prompt", "100")
        wait_for(8, complete)
    assert all(complete)
    status, _, answer = fetch(f"{deployed.url}/v1/completions", json.dumps({"prompt": [5] * 101, "max_tokens": 1}).encode())
    assert (status, "limit is 100" in json.loads(answer)["error"]["message"]) == (400, True)
    deployed.wait_for_replicas(None, frozenset(before))


@pytest.mark.parametrize("loaded", [False, True])
def test_without_a_cluster_it_starts_one_whose_replicas_follow_the_load_and_stops_it(
    bundle: Path, texts: dict[str, str], loaded: bool
) -> None:
    served = Served()
    command = [*COMMAND, "serve", str(bundle), "--ray", "--port", str(served.port), "--cpus", "1", "--replicas", "1:2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        assert any("running on" in line for line in server.stderr)
        assert fetch(f"{served.url}/health")[0] == 200
        served.wait_for_replicas(1)
        if loaded:
            with clients(served, texts):
                served.wait_for_replicas(2)
        with ThreadPoolExecutor(32) as pool:  # more than there are slots: waiting requests are answered, too
            answers = {pool.submit(ask, served, prompt, stream): prompt for prompt in PROMPTS for stream in (False, True) * 2}
            while not any(answer.done() for answer in answers):
                time.sleep(0.01)
            server.terminate()
            for answer, prompt in answers.items():
                assert answer.result() == (texts[prompt], True)
        assert server.wait(timeout=60) == 0, server.stderr.read()


def test_a_bundle_that_cannot_be_loaded_is_a_one_line_error(deployed: Deployed, bundle: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(bundle, tmp_path / "broken"))
    with open(broken / "tokenizer.json", "a") as file:
        file.write(" ")
    done = run(
        "serve", broken, "--ray", "--port", str(deployed.port), env=os.environ | {"RAY_ADDRESS": deployed.cluster.address}
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-2].startswith("error: the replicas do not start")
