"""The command line: one command per stage. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import errno
import io
import os
import sys
import warnings
from typing import Any, NoReturn, TextIO

import click

import outrider
from outrider.commands import bench, build_engine, calibrate, export, generate, inspect, plan, serve, verify
from outrider.errors import OutriderError, OutriderWarning, UsageError

# What to install where a package is missing, for those that `export,cpu` does not bring.
EXTRAS = {"fastapi": "serve", "prometheus_client": "serve", "starlette": "serve", "uvicorn": "serve", "ray": "serve,ray"}


class Commands(click.Group):
    """Turns expected failures into one line and the hint: exit code 2 for wrong use, 1 for failure."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OutriderError as error:
            _fail(ctx, str(error), error.hint, error.exit_code)
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx else "outrider"
            _fail(ctx, error.format_message(), f"see {command} --help", error.exit_code)
        except ImportError as error:
            if error.name is None or error.name.startswith("outrider"):
                raise
            message = f"this command needs the package {error.name}, which is not installed"
            extra = EXTRAS.get(error.name.split(".")[0], "export,cpu")
            _fail(ctx, message, f"pip install 'outrider[{extra}]'")
        except MemoryError:
            _fail(ctx, "out of memory", "use a smaller model, precision, capacity or batch")
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader has seen enough; click ends quietly
                raise
            # What is left in the buffer would fail once more when Python ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            _fail(ctx, f"input or output failed: {error}", "check where standard input and output lead")


def _fail(ctx: click.Context, message: str, hint: str, code: int = 1) -> NoReturn:
    click.echo(f"error: {_one_line(message)}", err=True)
    click.echo(f"hint:  {_one_line(hint)}", err=True)
    ctx.exit(code)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """What works but not as well as it could is one line, too; other libraries' warnings are for their developers."""
    if issubclass(category, OutriderWarning):
        click.echo(f"warning: {_one_line(str(message))}", err=True)


def _one_line(text: str) -> str:
    return " ".join(text.split())


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(outrider.__version__)
def main() -> None:
    """Compile a draft and a target language model into engines, and run them with speculative decoding.

    The stages, in order: export, build-engine, verify, generate or serve.
    """
    if sys.stderr is None:  # closed by whoever started us
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # for the life of the process
    if sys.stdout is None:
        raise UsageError("standard output is closed", "lead it somewhere, /dev/null if need be")
    warnings.showwarning = _show_warning
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows a question mark


for module in (export, build_engine, calibrate, verify, generate, serve, inspect, plan, bench):
    main.add_command(module.command)
