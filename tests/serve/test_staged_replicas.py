"""Commands that start a Ray cluster of their own for the stages of a target."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.cluster_utils import Cluster

from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.tests.serve.server import PROMPT, fetch, free_port, post, serving
from outrider.tests.support import COMMAND, ROOT, build

pytestmark = pytest.mark.slow


ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}


@pytest.fixture(scope="module")
def bundle(trained_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(trained_export, tmp_path_factory.mktemp("staged") / "bundle", stages="2", k=[1, 4], capacity=127, batch=2)


@pytest.fixture(scope="module")
def want(bundle: Path) -> str:
    with closing(Outrider.load(bundle)) as outrider:
        return "".join(event.text for event in outrider.generate(PROMPT, SamplingParams(max_new_tokens=24), k=0))


def test_generate_starts_a_cluster_that_lives_as_long_as_the_command(bundle: Path, want: str) -> None:
    command = [*COMMAND, "generate", str(bundle), "--stage-cores", "1", "--prompt", PROMPT, "--max-new-tokens", "24", "--json"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, json.loads(done.stdout or "{}").get("text")) == (0, want), done.stderr


def test_the_demo_finds_the_text_of_the_whole(tmp_path: Path) -> None:
    """As a user runs it, but for what it installs and where it writes."""
    command = ["make", "-o", ".venv/.installed-ray", "demo-stages", f"DEMO={tmp_path / 'demo'}"]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "\nAgent: " in done.stdout
    assert done.stdout.endswith("the whole target's text is the same, to the byte\n")


def signal_stages(server: int, sent: signal.Signals) -> None:
    """Send a signal to the stages of a server's cluster."""
    for process in psutil.Process(server).children(recursive=True):
        if "ray::StageHost" in " ".join(process.cmdline()):
            process.send_signal(sent)


def test_a_server_that_has_lost_a_stage_connects_a_new_one(bundle: Path, want: str) -> None:
    """One request gets the error. Until the stage is back, the server says so, and may be ended."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": 24, "temperature": 0}).encode()
    environment = {"RAY_ADDRESS": "local"}
    with serving(bundle, "--stage-cores", "1", env=environment) as server:
        for _ in range(2):
            status, answer = post(server, "/v1/completions", body)
            assert (status, answer["choices"][0]["text"]) == (200, want)
            signal_stages(server.process.pid, signal.SIGKILL)
            status, answer = post(server, "/v1/completions", body)
            assert (status, "stage 1 (layers 0-" in answer["error"]["message"]) == (500, True), answer
            status, answer = post(server, "/v1/completions", body)
            assert (status, answer["error"]["code"]) == (503, "not_ready"), answer
            assert server.health()[0] == 503
            server.ready()
        signal_stages(server.process.pid, signal.SIGKILL)
        assert post(server, "/v1/completions", body)[0] == 500
        assert server.stop() == 0


def test_a_stage_that_dies_while_nothing_runs_costs_no_request(bundle: Path, want: str) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 24, "temperature": 0}).encode()
    with serving(bundle, "--stage-cores", "1", env={"RAY_ADDRESS": "local"}) as server:
        assert post(server, "/v1/completions", body)[0] == 200
        signal_stages(server.process.pid, signal.SIGKILL)
        for _ in range(600):
            if any("the stages have been replaced" in line for line in server.log):
                break
            time.sleep(0.1)
        server.ready()
        status, answer = post(server, "/v1/completions", body)
        assert (status, answer["choices"][0]["text"]) == (200, want)


def test_after_a_signal_answers_finish_however_long_it_takes(bundle: Path, want: str) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 24, "temperature": 0}).encode()
    with serving(bundle, "--stage-cores", "1", env={"RAY_ADDRESS": "local"}) as server, ThreadPoolExecutor(1) as pool:
        signal_stages(server.process.pid, signal.SIGSTOP)
        answer = pool.submit(post, server, "/v1/completions", body)
        time.sleep(1)
        timer = threading.Timer(4, signal_stages, [server.process.pid, signal.SIGCONT])
        timer.start()
        assert server.stop() == 0
        status, found = answer.result()
        assert (status, found["choices"][0]["text"]) == (200, want)
    assert all(line.startswith("{") for line in server.log)  # Ray's handler of signals would print a stack trace


def test_while_a_stage_hangs_clients_wait_no_longer_than_they_would_for_an_answer(bundle: Path, want: str) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 24, "temperature": 0}).encode()
    with serving(bundle, "--stage-cores", "1", "--timeout", "3", env={"RAY_ADDRESS": "local"}) as server:
        signal_stages(server.process.pid, signal.SIGSTOP)
        for _ in range(2):
            began = time.monotonic()
            status, answer = post(server, "/v1/completions", body)
            assert (status, answer["error"]["code"]) == (504, "timeout"), answer
            assert 3 < time.monotonic() - began < 10
        assert server.health()[0] == 503
        server.ready()
        assert any("did not answer within 30 seconds" in line for line in server.log)  # the least; see `LEAST_PASSING`
        status, answer = post(server, "/v1/completions", body)
        assert (status, answer["choices"][0]["text"]) == (200, want)


def test_a_replica_whose_stage_dies_is_replaced(bundle: Path, want: str) -> None:
    """Until then, clients get errors; they never get another text."""
    port = free_port()
    body = json.dumps({"prompt": PROMPT, "max_tokens": 24, "temperature": 0}).encode()

    def ask() -> tuple[int, dict[str, Any]]:
        status, _, answer = fetch(f"http://127.0.0.1:{port}/v1/completions", body)
        return status, json.loads(answer)

    command = [*COMMAND, "serve", str(bundle), "--ray", "--stage-cores", "1", "--port", str(port)]
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            assert any("running on" in line for line in server.stderr)
            status, answer = ask()
            assert (status, answer["choices"][0]["text"]) == (200, want)
            signal_stages(server.pid, signal.SIGKILL)
            status, answer = ask()
            assert (status, "stage 1 (layers 0-" in answer["error"]["message"]) == (500, True), answer
            deadline = time.monotonic() + 120
            while (found := ask())[0] != 200:
                assert found[0] in (500, 503), found
                assert time.monotonic() < deadline
                time.sleep(0.2)
            assert found[1]["choices"][0]["text"] == want
        finally:
            server.terminate()
            assert server.wait(timeout=60) == 0


@pytest.mark.parametrize("nodes", [1, 4])
def test_replicas_have_stages_of_their_own(bundle: Path, want: str, nodes: int) -> None:
    """There is room for two replicas and the stage of each, and none takes the other's; also if each is on another node."""
    cores = 4 // nodes
    cluster, port = Cluster(initialize_head=True, head_node_args={"num_cpus": cores, "include_dashboard": False}), free_port()
    body = json.dumps({"prompt": PROMPT, "max_tokens": 24, "temperature": 0}).encode()
    command = [*COMMAND, "serve", str(bundle), "--ray", "--replicas", "2", "--stage-cores", "1", "--port", str(port)]
    try:
        for _ in range(1, nodes):
            cluster.add_node(num_cpus=cores)
        cluster.wait_for_nodes()
        environment = ENVIRONMENT | {"RAY_ADDRESS": cluster.address}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == 0, done.stderr
        replicas = set()
        for _ in range(40):
            status, headers, answer = fetch(f"http://127.0.0.1:{port}/v1/completions", body)
            assert (status, json.loads(answer)["choices"][0]["text"]) == (200, want), answer
            replicas.add(headers["X-Replica"])
        assert len(replicas) == 2
    finally:
        cluster.shutdown()


def test_a_machine_without_room_for_the_stages_is_refused_at_once(bundle: Path, trained_export: Path, tmp_path: Path) -> None:
    on_gpus = build(trained_export, tmp_path / "bundle", stages="2", stage_devices=("cuda:0", "cuda:1"), k=[1])
    for folder, cores, message in (
        (bundle, "999", "too few cores for 1 replicas with 1 and 999 for stages each"),
        (on_gpus, "1", "this machine has 0 GPUs, and 1 replicas take 3"),
    ):
        command = [*COMMAND, "serve", str(folder), "--ray", "--stage-cores", cores, "--port", str(free_port())]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 2
        assert message in done.stderr


def test_without_the_token_of_a_cluster_it_says_so(bundle: Path, tmp_path: Path) -> None:
    command = [*COMMAND, "generate", str(bundle), "--stage-cores", "1", "--prompt", "a"]
    with socket.create_server(("127.0.0.1", 0)) as cluster:
        address = f"127.0.0.1:{cluster.getsockname()[1]}"
        environment = ENVIRONMENT | {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token", "HOME": str(tmp_path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "error: no Ray cluster: RAY_AUTH_MODE asks for a token, and there is none" in done.stderr
