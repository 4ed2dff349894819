"""The command line: one command per stage. Heavy packages are imported only when a command needs them."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any, NoReturn

import click

import outrider
from outrider.commands import (
    bench,
    build_engine,
    cache,
    calibrate,
    chat,
    export,
    generate,
    inspect,
    plan,
    serve,
    train_draft,
    verify,
)
from outrider.commands.output import printable
from outrider.errors import OutriderError, UsageError, show_warnings

# The extra that installs a missing package. For every other package it is `export,cpu`.
EXTRAS = {
    **dict.fromkeys(("fastapi", "prometheus_client", "pythonjsonlogger", "starlette", "uvicorn"), "serve"),
    "ray": "serve,ray",
}


class Commands(click.Group):
    """Print an expected failure as two lines, message and hint. Exit with 2 after a usage error, with 130 after an interrupt as
    shells do, and with 1 after others."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OutriderError as error:
            flag = _flag(self.commands.get(ctx.invoked_subcommand or ""), error.param)
            hint = f"{flag}: {error.hint}" if flag and "--" not in error.hint else error.hint
            _fail(ctx, str(error), hint, error.exit_code)
        except click.exceptions.NoArgsIsHelpError:  # shows the help of a group
            raise
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx else "outrider"
            _fail(ctx, error.format_message(), f"see {command} --help", error.exit_code)
        except ImportError as error:
            if error.name is None or error.name.startswith("outrider"):
                raise
            message = f"this command needs the package {error.name}, which is not installed"
            extra = EXTRAS.get(error.name.split(".")[0], "export,cpu")
            _fail(ctx, message, f"pip install 'outrider[{extra}]'")
        except KeyboardInterrupt:
            click.echo(err=True)  # after the terminal's ^C
            _fail(ctx, "interrupted", "nothing half-written was left; run the same command again", 130)
        except MemoryError:
            _fail(ctx, "out of memory", "use a smaller model, precision, capacity or batch")
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader closed the pipe: click exits quietly
                raise
            # Flushing the rest of the buffer at exit would fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            _fail(ctx, f"input or output failed: {error}", "check what standard input and output are connected to")


def _flag(command: click.Command | None, param: str | None) -> str | None:
    """Return a command's flag for a request parameter, such as --max-new-tokens for max_new_tokens; None if it has none."""
    options = command.params if command is not None else []
    return next((each.opts[-1] for each in options if isinstance(each, click.Option) and each.name == param), None)


def _fail(ctx: click.Context, message: str, hint: str, code: int = 1) -> NoReturn:
    click.echo(f"error: {_one_line(message)}", err=True)
    click.echo(f"hint:  {_one_line(hint)}", err=True)
    ctx.exit(code)


def _show_warning(message: str) -> None:
    click.echo(f"warning: {_one_line(message)}", err=True)


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(outrider.__version__)
def main() -> None:
    """Compile a draft and a target language model into engines, and run them with speculative decoding.

    The usual order is export, build-engine, verify, then generate or serve.
    """
    if sys.stderr is None:  # the parent process closed it
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # open until the process exits
    if sys.stdout is None:
        raise UsageError("standard output is closed", "redirect it, for example to /dev/null")
    show_warnings(_show_warning)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # print a question mark for characters that the terminal lacks


for module in (export, train_draft, build_engine, calibrate, verify, generate, chat, serve, inspect, plan, bench, cache):
    main.add_command(module.command)

if __name__ == "__main__":
    main()
