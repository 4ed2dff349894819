"""The documents name what exists: files, headings, commands, parameters, metrics and fields."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest

from outrider.bundle import manifest
from outrider.cli import main
from outrider.tests.support import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """Return a page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the ids that a page's headings get."""
    titles = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """The build of the site checks the pages in docs/ alone."""
    for link in LINK.findall(prose(page)):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def examples() -> Iterator[tuple[str, str]]:
    """Yield each `outrider` command line in the documents, with its page."""
    for page in PAGES:
        for line in re.findall(r"^ {4}outrider (.*)$", page.read_text().replace("\\\n", " "), flags=re.MULTILINE):
            if page.name != "CHANGELOG.md":
                yield str(page.relative_to(ROOT)), line


@pytest.mark.parametrize(("page", "line"), sorted(set(examples())))
def test_every_option_of_an_example_exists(page: str, line: str) -> None:
    name, *rest = shlex.split(line, comments=True)
    command = main.commands[name]
    if isinstance(command, click.Group):
        command = command.commands[rest.pop(0)]
    options = {option for each in command.params if isinstance(each, click.Option) for option in each.opts}
    assert {word.partition("=")[0] for word in rest if word.startswith("-")} <= options, page


def test_the_reference_has_every_command() -> None:
    headings = anchors(ROOT / "docs" / "reference" / "cli.md")
    assert {f"outrider-{name}" for name in main.commands} <= headings


def test_the_reference_has_every_field_of_the_manifest() -> None:
    page = (ROOT / "docs" / "reference" / "manifest.md").read_text()
    structs = (manifest.Manifest, manifest.Model, manifest.Generation, manifest.Build, manifest.Parity, manifest.Quantization)
    for struct in (*structs, manifest.Cost, manifest.FileEntry):
        for field in msgspec.structs.fields(struct):
            assert f"`{field.name}`" in page, f"{struct.__name__}.{field.name}"


def test_the_reference_has_every_http_parameter() -> None:
    from outrider.serve.api.chat_protocol import ChatRequest
    from outrider.serve.api.completions_protocol import CompletionRequest
    from outrider.serve.api.responses_protocol import ResponsesRequest

    page = (ROOT / "docs" / "reference" / "http-api.md").read_text()
    for name in {**CompletionRequest.model_fields, **ChatRequest.model_fields, **ResponsesRequest.model_fields}:
        assert re.search(rf"`{name}[`:]", page), name


def test_the_reference_lists_what_is_accepted_without_effect() -> None:
    import outrider.serve.api.responses_protocol  # noqa: F401  # its kinds count, too
    from outrider.serve.api.protocol import Strict

    def fields(kind: type[Strict]) -> set[str]:
        return set(kind.no_effect).union(*map(fields, kind.__subclasses__()))

    page = (ROOT / "docs" / "reference" / "http-api.md").read_text()
    section = page.partition("### Accepted without effect")[2].partition("\n### ")[0]
    assert len(fields(Strict)) > 20
    assert {name for name in fields(Strict) if f"`{name}`" not in section} == set()


def test_the_reference_has_every_metric() -> None:
    from outrider.serve.metrics import Metrics

    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    listed = set(re.findall(r"`(outrider_\w+)", page))
    metrics = {f"{each.name}_total" if each.type == "counter" else each.name for each in Metrics().registry.collect()}
    assert listed == metrics


def test_the_readme_is_short() -> None:
    text, _, _ = (ROOT / "README.md").read_text().partition("## Where to go next")
    assert len(re.findall(r"\S*\w\S*", text)) <= 950
