"""What the modules about the HTTP API share; many have a `bundle` or a `server` of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from outrider.runtime.generation import Outrider
from outrider.tests.serve.server import Reached, chat_bundle, serving_here

# Writes a line for each grammar that a worker compiles.
COUNTING = """
import sys
import outrider.runtime.grammar.compiler as compiler
from outrider.serve.workers import worker_main
make, file = compiler.LLMatcher, sys.argv.pop(1)
def counted(*given, **options):
    with open(file, "a") as lines:
        print(hash(given[1]), file=lines)
    return make(*given, **options)
compiler.LLMatcher = counted
worker_main.main()
"""


@pytest.fixture(scope="module")
def compilations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], int]]:
    """Return the number of grammars that the workers of the module's servers have compiled so far."""
    file, started = tmp_path_factory.mktemp("workers") / "compiled", subprocess.Popen
    file.touch()

    def counting(command: Any, *given: Any, **options: Any) -> Any:
        if command[1:4] == ["-P", "-m", "outrider.serve.workers.worker_main"]:
            command = [sys.executable, "-P", "-c", COUNTING, str(file), *command[4:]]
        return started(command, *given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", counting)
        yield lambda: len(file.read_text().splitlines())


@pytest.fixture(scope="module")
def bundle(trained_export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_bundle(trained_export, tmp_path_factory.mktemp("served") / "bundle")


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Reached]:
    with serving_here(bundle, k=4) as server:  # `k = auto` may not draft on a slow machine
        yield server


@pytest.fixture(scope="module")
def alone(bundle: Path) -> Outrider:
    return Outrider.load(bundle)


@pytest.fixture
def client(server: Reached) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
