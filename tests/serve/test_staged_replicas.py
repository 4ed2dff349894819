"""Commands that start a Ray cluster of their own for the stages of a target."""

from __future__ import annotations

import json
import os
import subprocess
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.tests.serve.server import PROMPT, fetch, free_port
from outrider.tests.support import COMMAND, build

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
            for process in psutil.Process(server.pid).children(recursive=True):
                if "ray::StageHost" in " ".join(process.cmdline()):
                    process.kill()
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
