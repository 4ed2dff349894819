"""Options that several commands share, and help that shows options in groups."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.backends import registry
from outrider.commands.output import printable, progress_bar
from outrider.engines.precisions import PRECISIONS
from outrider.errors import UsageError, text_of
from outrider.export.weights.rounding import AS_IS
from outrider.prepare.wanted import Wanted
from outrider.runtime import drafters
from outrider.runtime.policy.choice import AUTO

if TYPE_CHECKING:
    from outrider.prepare.prepare import Prepared

LORA: dict[str, Any] = {
    "metavar": "FOLDER[=WEIGHT]",
    "multiple": True,
    "help": "Merge a LoRA adapter that PEFT saved, a folder or a hub id, into the target; may be repeated. WEIGHT scales"
    " it.  [default: 1]",
}
NO_TEMPLATE = "there is no chat template, so chats are refused; --chat-template FILE adds one"


class Registered(click.Choice[str]):
    """A choice among registered names. They are looked up on use, because names may be registered after import."""

    def __init__(self, names: Callable[[], Iterable[str]]):
        self.case_sensitive = True
        self._names = names

    @property
    def choices(self) -> Sequence[str]:  # type: ignore[override]  # click has an attribute
        return tuple(self._names())


class GroupedOption(click.Option):
    """An option that help shows under the heading `group`."""

    def __init__(self, *args: Any, group: str, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose help shows options by group; options without a group come last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in sorted(self.get_params(ctx), key=lambda each: not isinstance(each, GroupedOption)):
            if isinstance(parameter, click.Option) and (record := parameter.get_help_record(ctx)):
                groups.setdefault(getattr(parameter, "group", "Options"), []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


def number_or_auto(_: click.Context, __: click.Parameter, text: str) -> int | str:
    """Parse a k (click callback)."""
    if text != "auto" and not text.isdecimal():
        raise click.BadParameter(f"{text!r} is neither a number nor auto")
    return text if text == "auto" else int(text)


def sizes(_: click.Context, __: click.Parameter, text: str | None) -> list[int] | None:
    """Parse numbers separated by commas (click callback)."""
    try:
        return None if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of numbers such as 1,2,4,8") from None


def template(_: click.Context, __: click.Parameter, path: Path | None) -> str | None:
    """Read and check a chat template (click callback).

    Raises:
        UsageError: it cannot be read, does not compile, or does not show what users say.
    """
    if path is None:
        return None
    from outrider.runtime.text.chat_template import ChatTemplate

    text = text_of(path, "pass a Jinja template as --chat-template")
    try:
        ChatTemplate(text, {}).check()
    except UsageError as error:
        raise UsageError(f"{path}: {error}", "correct the template") from error
    return text


backend = click.option(
    "--backend",
    cls=GroupedOption,
    group="Engines",
    type=Registered(lambda: (AUTO, *registry.names())),
    default=AUTO,
    show_default=True,
    help="Inference backend to build for; auto is OpenVINO for targets of a billion parameters or more on x86-64 with AVX-512,"
    " if it is installed and takes the models, and otherwise ONNX Runtime.",
)


def model(command: Any) -> Any:
    """Add the argument MODEL and the options of its preparation to a command, which receives one `Wanted`."""

    @functools.wraps(command)
    def wrapped(
        model: str,
        drafts: tuple[str, ...],
        precision: str | None,
        backend: str,
        capacity: int | None,
        batch: int | None,
        lora: tuple[str, ...],
        **options: Any,
    ) -> Any:
        return command(wanted=Wanted(model, drafts, lora, precision, backend, capacity, batch), **options)

    grouped: dict[str, Any] = {"cls": GroupedOption, "group": "Engines"}
    for add in (
        click.option(
            "--batch",
            type=click.IntRange(min=1),
            help="Maximum number of sequences in a batch.  [default: by memory]",
            **grouped,
        ),
        click.option("--capacity", type=click.IntRange(min=1), help="Cache size in tokens.  [default: by memory]", **grouped),
        backend,
        click.option(
            "--precision",
            type=click.Choice([*PRECISIONS, AS_IS]),
            help="Precision of the weights.  [default: as-is for a checkpoint in 4 bits (of GGUF: Q4_0), otherwise int4, or"
            " int8 if int4 costs the model too much]",
            **grouped,
        ),
        click.option("--lora", **LORA, **grouped),
        click.option(
            "--draft",
            "drafts",
            metavar="SOURCE",
            multiple=True,
            help="The draft; may be repeated. See outrider export.",
            **grouped,
        ),
        click.argument("model"),
    ):
        wrapped = add(wrapped)
    return wrapped


def bundle_of(wanted: Wanted, device: str | None, k: int | str, stage_cores: int | None = None) -> Prepared:
    """Return the bundle of a model. What is missing is made first, with progress, and standard error tells what was chosen.

    Raises:
        UsageError: stages get cores, and the model is no bundle with stages.
    """
    from outrider.bundle.folder import has_manifest, read_manifest
    from outrider.prepare.prepare import prepare

    if stage_cores is not None:
        build = read_manifest(Path(wanted.model)).build if has_manifest(Path(wanted.model)) else None
        if build is None or not build.stages:
            hint = "make one with outrider build-engine --stages 2, or leave --stage-cores out"
            raise UsageError(f"--stage-cores needs a bundle with stages, and {wanted.model} is none", hint)
    with progress_bar() as progress:
        made = prepare(replace(wanted, device=device, k=k), progress)
    for line in made.lines:
        click.echo(printable(line), err=True)
    return made


k = click.option(
    "--k",
    cls=GroupedOption,
    group="Speculation",
    default=AUTO,
    show_default=True,
    callback=number_or_auto,
    help="Draft tokens per round: a number built into the bundle, 0 for plain decoding, or auto to choose one each round.",
)
drafter = click.option(
    "--drafter",
    cls=GroupedOption,
    group="Speculation",
    type=Registered(lambda: (*drafters.names(), AUTO)),
    help=f"Where draft tokens come from: {', '.join(f'{name} ({drafters.get(name).label})' for name in drafters.names())}, or"
    " auto, whichever is fastest.  [default: auto if --k is auto, else the first of these that the bundle supports]",
)
chat_template = click.option(
    "--chat-template",
    type=click.Path(path_type=Path),
    metavar="FILE",
    callback=template,
    help="Use the chat template in this file (Jinja) instead of the model's own.",
)
memory_file = click.option(
    "--memory",
    "memory_file",
    cls=GroupedOption,
    group="Speculation",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Draft from the earlier requests in this file, if it exists, and add what is answered. Only this user can read it.",
)
stage_cores = click.option(
    "--stage-cores",
    type=click.IntRange(min=1, max=1024),
    help="Run each stage of the target but the last in a process of its own, with this many cores, and a GPU if it is for"
    " one, in the Ray cluster at $RAY_ADDRESS or in a local one.  [default: run all stages in one process]",
)
device = click.option(
    "--device",
    type=Registered(registry.devices),
    help="The device to run on, if the bundle's backend has several.  [default: the device it was built for]",
)
