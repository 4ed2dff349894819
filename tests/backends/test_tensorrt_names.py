"""The names of TensorRT that our code uses exist in its releases: also those that no test without a GPU reaches."""

from __future__ import annotations

import operator
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from outrider.tests.support import ROOT

# What the extra `tensorrt` allows.
RELEASES = "10.15.1.29", "10.16.1.11", "11.0.0.114", "11.4.0.106"
OBJECTS = {  # as our code calls them, and their class
    r"\bplan": "ICudaEngine",
    r"self\._plan": "ICudaEngine",
    r"context\.context": "IExecutionContext",
    "_runtime": "Runtime",
}
LIBRARIES = "nvinfer", "nvinfer_plugin", "nvonnxparser"


def used(every: bool) -> list[str]:
    """Return the names in the backend's source: every one, or all but those that it uses only where they exist."""
    source = "\n".join(path.read_text() for path in (ROOT / "backends" / "tensorrt").glob("*.py"))
    names = {*re.findall(r"\btrt\.([A-Z]\w*(?:\.\w+)*)", source)}
    for variable, kind in OBJECTS.items():
        called = rf"{variable}\.((?:get|set|is|execute|infer|create|num|deserialize|streamable|weight|engine)_\w+)"
        names |= {f"{kind}.{name}" for name in re.findall(called, source)}
    names |= {f"ICudaEngine.{name}" for name in re.findall(r'getattr\(plan, "(\w+)"', source)}
    assert {"ICudaEngine.weight_streaming_budget_v2", "IExecutionContext.execute_async_v3"} <= names
    guarded = {
        "Runtime.get_engine_validity",
        "EngineValidity.INVALID",
        "EngineInvalidityDiagnostics.__members__",
    }  # in `check_validity`
    guarded |= {".".join(each) for each in re.findall(r'hasattr\(trt\.(\w+), "(\w+)"\)', source)}
    return sorted(names if every else names - guarded)


def test_those_of_tensorrt_rtx() -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="pip install 'outrider[rtx]'")
    for name in used(every=True):
        operator.attrgetter(name)(trt)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="makes libraries as Linux has them")
@pytest.mark.parametrize("release", RELEASES)
def test_those_of_tensorrt_and_of_polygraphy_over_it(release: str, tmp_path: Path) -> None:
    """In the release's own Python bindings, over libraries without functions: the real ones take gigabytes and a GPU."""
    fetched = ["--only-binary", ":all:", "--no-deps", "--dest", str(tmp_path), f"tensorrt-cu13-bindings=={release}"]
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *fetched], check=True)
    zipfile.ZipFile(next(tmp_path.glob("*.whl"))).extractall(tmp_path)
    bindings = tmp_path / "tensorrt_bindings" / "tensorrt.so"
    undefined = subprocess.run(["nm", "-D", "--undefined-only", bindings], capture_output=True, text=True, check=True).stdout
    functions = re.findall(r"U ((?:createInfer|createNv|getNv|getPlugin|getBuilder|initLib)\w+)$", undefined, re.M)
    for library in LIBRARIES:
        made = tmp_path / f"lib{library}.so.{release.split('.')[0]}"
        source = "".join(f"void {name}(void) {{ __builtin_trap(); }}\n" for name in functions if library == "nvinfer")
        command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{made.name}", "-x", "c", "-", "-o", str(made)]
        subprocess.run(command, input=source, text=True, check=True)
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": paths}
    stub = [sys.executable, "-m", "outrider.tests.backends.tensorrt_stub"]
    done = subprocess.run([*stub, *used(every=False)], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == release, done.stderr[-2000:]
