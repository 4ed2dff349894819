"""The repository layout: which folder may import which, what the wheel contains, and what the runtime works without."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from outrider.tests.support import ROOT

MODULES = {"__init__.py", "__main__.py", "cli.py", "errors.py", "progress.py"}  # of the root; all import the last two
MAY_IMPORT: dict[str, set[str]] = {
    "engines": set(),
    "bundle": {"engines"},
    "backends": {"bundle", "engines"},
    "runtime": {"backends", "bundle", "engines"},
    "export": {"backends", "bundle", "engines", "runtime"},
    "builder": {"backends", "bundle", "engines", "runtime"},
    "training": {"backends", "builder", "bundle", "engines", "export", "runtime"},
    "audit": {"backends", "bundle", "engines", "runtime"},
    "bench": {"backends", "builder", "bundle", "engines", "runtime"},
    "serve": {"bundle", "engines", "runtime"},
    "prepare": {"backends", "builder", "bundle", "engines", "export", "runtime"},
    "commands": {
        "audit",
        "backends",
        "bench",
        "builder",
        "bundle",
        "engines",
        "export",
        "prepare",
        "runtime",
        "serve",
        "training",
    },
}
FOLDERS = tuple(MAY_IMPORT)
OF_LIBRARIES = {"_asdict", "_fields", "_make", "_replace", "_keys_to_ignore_on_load_unexpected"}  # named tuples, transformers
ACCESSORS = {"getattr", "setattr", "delattr", "hasattr"}
HEAVY = {"torch", "transformers", "tensorrt", "tensorrt_rtx", "onnxruntime", "onnx"}


def imports(path: Path) -> set[str]:
    """Return every module that a file imports, at any depth."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return modules


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_go_one_way(folder: str) -> None:
    allowed = MAY_IMPORT[folder] | {folder}
    for path in (ROOT / folder).rglob("*.py"):
        for module in imports(path):
            parts = module.split(".")
            if parts[0] == "outrider" and len(parts) > 1 and parts[1] in (*FOLDERS, "experiments", "tests", "scripts", "cli"):
                assert parts[1] in allowed, f"{path} imports {module}"
            assert parts[0] not in FOLDERS, f"{path} imports {module} past the package"


def test_no_file_imports_one_that_imports_it() -> None:
    """At any distance, and for types alone as well."""
    files = {
        f"outrider.{'.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__')}": path
        for folder in (*FOLDERS, "experiments")
        for path in (ROOT / folder).rglob("*.py")
    }
    graph = {name: imports(path) & files.keys() - {name} for name, path in files.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError with the files


def named(tree: ast.Module) -> list[str]:
    """Return the names of a file's classes at any depth, and of its aliases of types."""
    classes = [each.name for each in ast.walk(tree) if isinstance(each, ast.ClassDef)]
    assigned = [each for each in tree.body if isinstance(each, ast.Assign) and "TypeVar" not in ast.unparse(each.value)]
    return classes + [name for each in assigned if re.match("[A-Z][a-z]", name := ast.unparse(each.targets[0]))]


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for folder in (*FOLDERS, "experiments"):
        for path in (ROOT / folder).rglob("*.py"):
            for name in named(ast.parse(path.read_text())):
                places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_only_export_and_training_import_torch() -> None:
    for folder in sorted({*FOLDERS} - {"export", "training"}):
        for path in (ROOT / folder).rglob("*.py"):
            assert not {module.split(".")[0] for module in imports(path)} & {"torch", "transformers"}, path


def test_every_folder_of_the_package_is_in_the_tests_above() -> None:
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"experiments", "tests", "scripts"}
    assert folders == set(FOLDERS)


def test_no_folder_may_be_imported_past_the_package() -> None:
    banned = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    assert {*FOLDERS, "experiments"} <= banned.keys()


def test_the_layout_table_lists_what_each_folder_may_import() -> None:
    rows = re.findall(r"^\| `(\w+)/` \|.*\| ([^|]*) \|$", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE)
    listed = {folder: set(re.findall(r"`(\w+)`", allowed)) for folder, allowed in rows if folder in FOLDERS}
    assert listed == {folder: allowed for folder, allowed in MAY_IMPORT.items() if folder != "commands"}


def test_every_folder_of_the_package_is_shipped() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    inits = [path.relative_to(ROOT).parent for folder in FOLDERS for path in (ROOT / folder).rglob("__init__.py")]
    assert set(listed) == {"outrider", *(".".join(["outrider", *path.parts]) for path in inits)}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in OF_LIBRARIES


def defined(nodes: list[ast.AST]) -> set[str]:
    """Return the private names that a file gives to functions, classes, variables and attributes."""
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and getattr(node.value, "id", "") in ("self", "cls")
    }
    return set(filter(private, names))


def used(nodes: list[ast.AST]) -> set[str]:
    """Return the private names that a file reads as attributes, imports, or names in calls such as `setattr`."""
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    for call in [node for node in nodes if isinstance(node, ast.Call)]:
        if getattr(call.func, "attr", getattr(call.func, "id", "")) in ACCESSORS:
            names |= {str(each.value).split(".")[-1] for each in call.args if isinstance(each, ast.Constant)}
    return set(filter(private, names))


def test_tests_use_no_private_name_of_the_package() -> None:
    """What a test needs of a class, others may need as well. A name that the test's own classes have is theirs."""

    def nodes(folder: str) -> dict[Path, list[ast.AST]]:
        return {path: [*ast.walk(ast.parse(path.read_text()))] for path in (ROOT / folder).rglob("*.py")}

    ours = set[str]().union(*(defined(each) for folder in FOLDERS for each in nodes(folder).values()))
    assert {"_recorded", "_passes"} <= ours
    found = {str(path.relative_to(ROOT)): used(each) & ours - defined(each) for path, each in nodes("tests").items()}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel, built from the source distribution, as it would be published."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (sdist,) = out.glob("*.tar.gz")
    assert tarfile.is_tarfile(sdist)
    (made,) = out.glob("*.whl")
    return made


def test_the_wheel_holds_every_module_and_no_stray_one(wheel: Path) -> None:
    trained = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {f"outrider/{path.relative_to(ROOT).as_posix()}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    expected |= {f"outrider/{name}" for name in MODULES} | {"outrider/py.typed"}
    expected |= {"outrider/builder/workloads.jsonl", "outrider/serve/api/page.html"}
    assert trained == expected


def test_no_file_is_long() -> None:
    folders = (*FOLDERS, "experiments", "tests")
    lengths = {path: path.read_text().count("\n") for folder in folders for path in (ROOT / folder).rglob("*.py")}
    assert {path: length for path, length in lengths.items() if length > 320} == {}


def test_the_root_has_no_stray_module() -> None:
    assert {path.name for path in ROOT.glob("*.py")} == MODULES


@pytest.mark.parametrize(
    "statement", ["import outrider", "from outrider.cli import main; main(['--help'], standalone_mode=False)"]
)
def test_nothing_heavy_is_imported_before_it_is_needed(statement: str) -> None:
    code = f"{statement}\nimport sys\nprint('loaded', sorted(set(sys.modules) & {HEAVY!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded []"


@pytest.fixture(scope="module")
def runtime_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Python with only `outrider[cpu]` from the wheel, as on an edge machine."""
    folder = tmp_path_factory.mktemp("edge")
    venv.create(folder)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-compile"]
    subprocess.run([*install, f"outrider[cpu] @ file://{wheel}"], check=True, capture_output=True)
    return python


def test_the_runtime_needs_no_torch_no_transformers_no_onnx(runtime_python: Path, tiny_export: Path, tmp_path: Path) -> None:
    def outrider(*arguments: str) -> str:
        command = [str(runtime_python.parent / "outrider"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    listing = [sys.executable, "-m", "pip", "--python", str(runtime_python), "list"]
    listed = subprocess.run(listing, capture_output=True, text=True, check=True).stdout
    assert not {line.split()[0] for line in listed.splitlines() if line.strip()} & {"torch", "transformers", "onnx"}
    bundle = str(tmp_path / "bundle")
    outrider("build-engine", str(tiny_export), "-o", bundle, "--capacity", "64", "--max-prompt-chunk", "8")
    assert "all files match their digests" in outrider("inspect", bundle)
    assert outrider("generate", bundle, "--prompt", "the quick", "--max-new-tokens", "4")


def test_a_command_whose_packages_are_missing_says_what_to_install(
    runtime_python: Path, checkpoints: Path, tmp_path: Path
) -> None:
    target = str(checkpoints / "target")
    command = [str(runtime_python.parent / "outrider"), "export", "--target", target, "-o", str(tmp_path / "x")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "not installed" in done.stderr
    assert "pip install 'outrider[export" in done.stderr
    assert "Traceback" not in done.stderr
