"""Options that several commands have, and how help shows them in groups."""

from __future__ import annotations

from typing import Any

import click


class In(click.Option):
    """An option of a group."""

    def __init__(self, *args: Any, group: str, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.group = group


class Grouped(click.Command):
    """A command whose help shows its options in groups, those of none last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in sorted(self.get_params(ctx), key=lambda each: not isinstance(each, In)):
            if isinstance(parameter, click.Option) and (record := parameter.get_help_record(ctx)):
                groups.setdefault(getattr(parameter, "group", "Options"), []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


def number_or_auto(_: click.Context, __: click.Parameter, text: str) -> int | str:
    """A callback for a k."""
    if text != "auto" and not text.isdecimal():
        raise click.BadParameter(f"{text!r} is no number, and not auto")
    return text if text == "auto" else int(text)


def sizes(_: click.Context, __: click.Parameter, text: str | None) -> list[int] | None:
    """A callback for numbers separated by commas."""
    try:
        return None if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} is no list of numbers such as 1,2,4,8") from None


device = click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="Where an onnxruntime bundle runs.  [default: where it was built]",
)
