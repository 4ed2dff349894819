"""`outrider cache`."""

from __future__ import annotations

import json
from datetime import datetime

import click

from outrider.commands.output import console
from outrider.errors import FolderError, UsageError


@click.group("cache")
def command() -> None:
    """Show and clear the cache of exports and bundles that generate, chat and serve make.

    It is in $OUTRIDER_CACHE, or else in the platform's folder for caches, and takes at most $OUTRIDER_CACHE_LIMIT gigabytes,
    50 by default: beyond that, the least recently used entries are removed.
    """


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
def list_(as_json: bool) -> None:
    """List the entries, the most recently used first."""
    from outrider.prepare.cache import Cache

    cache = Cache.of_user()
    entries = cache.entries()
    if as_json:
        rows = [
            {"name": each.name, "bytes": each.size, "used": each.used, "release": each.release, "in_use": each.in_use}
            for each in entries
        ]
        click.echo(json.dumps({"folder": str(cache.root), "limit": cache.limit, "entries": rows}))
        return
    from rich.table import Table

    table = Table("name", "MB", "last used", "release")
    for each in entries:
        used = "now" if each.in_use else f"{datetime.fromtimestamp(each.used):%Y-%m-%d %H:%M}"
        table.add_row(each.name, f"{each.size / 1e6:,.1f}", used, each.release or "unfinished")
    if entries:
        console().print(table)
    total = sum(each.size for each in entries)
    click.echo(f"{total / 1e9:.2f} GB of {cache.limit / 1e9:g} GB in {cache.root}")


@command.command("prune")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--all", "every", is_flag=True, help="Remove every entry.")
def prune(names: tuple[str, ...], every: bool) -> None:
    """Remove entries that no process uses. If one that was asked for stays, the exit code is 1.

    Without a NAME, these are what interrupted commands and other releases left, and the least recently used entries while the
    cache is over its limit.
    """
    from outrider.prepare.cache import Cache, release

    if every and names:
        raise UsageError("--all and names contradict each other", "leave one of them out")
    cache = Cache.of_user()
    asked = every or names != ()
    names = names or tuple(each.name for each in cache.entries() if every or each.release != release())
    removed, kept = cache.prune(names)
    removed += cache.prune()[0]
    for each in removed:
        click.echo(f"removed {each.name}")
    click.echo(f"freed {sum(each.size for each in removed) / 1e9:.2f} GB")
    if kept and asked:
        reasons = ", ".join(f"{name} ({reason})" for name, reason in kept.items())
        raise FolderError(
            f"not removed: {reasons}", "end the processes that use them, or remove them as the user who created them"
        )
