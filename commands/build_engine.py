"""`outrider build-engine`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from outrider.backends import registry
from outrider.backends.option import Option
from outrider.commands.options import GroupedCommand, GroupedOption, Registered, backend, sizes
from outrider.commands.output import bundle_table, console, costs_note, print_json, progress_bar

ENGINES = "Engines"
DEVICES = {name: registry.get(name).devices for name in registry.names() if registry.get(name).devices}


def _words(_: click.Context, __: click.Parameter, text: str | None) -> tuple[str, ...] | None:
    """Parse words separated by commas (click callback)."""
    return None if text is None else tuple(part.strip() for part in text.split(","))


def _different_words(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[str, ...] | None:
    """Do the same, but drop repetitions (click callback)."""
    words = _words(context, parameter, text)
    return None if words is None else tuple(dict.fromkeys(words))


def _click_option(option: Option, owners: list[str]) -> Callable[[Any], Any]:
    """Return a click option for a backend option; `owners` are the backends that have it."""
    keywords: dict[str, Any] = {"type": click.Choice(option.choices) if option.choices else option.type}
    if option.type is bool:
        keywords = {"is_flag": True, "default": None}
    elif option.type is tuple:
        keywords = {"callback": _different_words}
    elif option.type is Path:
        keywords = {"type": click.Path(dir_okay=False)}
    group = f"{'Backends' if len(owners) > 1 else 'Backend'} {' and '.join(owners)}"
    return click.option(option.flag, cls=GroupedOption, group=group, help=option.help, metavar=option.metavar, **keywords)


def _backend_options(command: Any) -> Any:
    """Add the options of all backends to the command."""
    options: dict[str, tuple[Option, list[str]]] = {}
    for name in registry.names():
        for option in registry.get(name).options:
            options.setdefault(option.name, (option, []))[1].append(name)
    for option, owners in reversed(options.values()):  # decorators apply from the last one up
        command = _click_option(option, owners)(command)
    return command


@click.command("build-engine", cls=GroupedCommand)
@click.argument("source", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="BUNDLE",
    type=click.Path(path_type=Path),
    help="The folder to write; it must not exist.",
)
@backend
@click.option(
    "--k",
    cls=GroupedOption,
    group=ENGINES,
    callback=sizes,
    metavar="LIST",
    default="1,2,4,8",
    show_default=True,
    help="Numbers of draft tokens per round to build for.",
)
@click.option(
    "--capacity",
    cls=GroupedOption,
    group=ENGINES,
    type=int,
    help="Cache size in tokens, for prompt and answer together.  [default: 1024, or less if the models allow less]",
)
@click.option(
    "--batch",
    cls=GroupedOption,
    group=ENGINES,
    type=int,
    default=1,
    show_default=True,
    help="Maximum number of sequences in a batch.",
)
@click.option(
    "--max-prompt-chunk",
    cls=GroupedOption,
    group=ENGINES,
    type=int,
    help="Maximum number of prompt tokens per prefill pass.  [default: 64]",
)
@click.option(
    "--device",
    cls=GroupedOption,
    group=ENGINES,
    type=Registered(registry.devices),
    help=f"{' and '.join(DEVICES)} only: the device to measure on, and to run on by default.  [default: cpu]",
)
@click.option(
    "--stages",
    cls=GroupedOption,
    group=ENGINES,
    metavar="NUMBER|LAYERS",
    help="Cut the target into this many stages of about equal size, or into these layers: 0-13,14-27.",
)
@click.option(
    "--stage-device",
    "stage_devices",
    cls=GroupedOption,
    group=ENGINES,
    callback=_words,
    metavar="DEVICE,...",
    help="The device of each stage: cuda:0,cuda:1, or cpu:threads=4,cpu:threads=2. Drafts run on that of the last stage,"
    " unless --draft-device says otherwise."
    "  [default: --device, for all of them]",
)
@click.option(
    "--stage-backend",
    "stage_backends",
    cls=GroupedOption,
    group=ENGINES,
    callback=_words,
    metavar="BACKEND,...",
    help="The backend of each stage: onnxruntime,openvino. Drafts have that of the last stage.  [default: --backend, for all]",
)
@click.option(
    "--draft-device",
    cls=GroupedOption,
    group=ENGINES,
    metavar="DEVICE",
    help="The device of draft models: cuda:0.  [default: that of the target, or of its last stage]",
)
@click.option(
    "--costs",
    cls=GroupedOption,
    group=ENGINES,
    metavar="BUNDLE",
    type=click.Path(path_type=Path),
    help="Copy the costs and acceptance of this bundle instead of measuring them. It must have the same models and sizes, and"
    " be measured on the machine where the new bundle will run.",
)
@_backend_options
@click.option("--json", "as_json", is_flag=True, help="Print the manifest on standard output.")
def command(
    source: Path,
    output: Path,
    backend: str,
    k: list[int],
    capacity: int | None,
    batch: int,
    max_prompt_chunk: int | None,
    device: str | None,
    stages: str | None,
    stage_devices: tuple[str, ...] | None,
    stage_backends: tuple[str, ...] | None,
    draft_device: str | None,
    costs: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Build the engines of an exported pair, and write them as a bundle."""
    from outrider.builder.build import build_engine
    from outrider.bundle.folder import read_manifest
    from outrider.errors import UsageError

    measured = None if costs is None else read_manifest(costs).build
    if costs is not None and (measured is None or not measured.costs):
        raise UsageError(f"{costs} has no costs", "pass a bundle that build-engine or outrider calibrate has measured")
    with progress_bar() as progress:
        manifest = build_engine(
            source,
            output,
            backend=backend,
            k=k,
            capacity=capacity,
            batch=batch,
            max_prompt_chunk=max_prompt_chunk,
            device=device,
            stages=stages,
            stage_devices=stage_devices or (),
            stage_backends=stage_backends or (),
            draft_device=draft_device,
            options={name: value for name, value in options.items() if value is not None},
            measured=measured,
            progress=progress,
        )
    if as_json:
        print_json(manifest.encode())
    else:
        console().print(bundle_table(manifest))
        if manifest.build is not None and manifest.build.timed[1]:
            click.echo(f"costs: {costs_note(*manifest.build.timed)}")
        click.echo(f"wrote {output}")
