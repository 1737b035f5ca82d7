"""``vmserve cache``: what ``--kv-persist`` keeps in a directory."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from vmserve.errors import ConfigurationError
from vmserve.memory.persist import Space, clear, list_spaces, verify
from vmserve.numbers.sizes import format_size

__all__ = ["app"]

app = typer.Typer(
    name="cache",
    help="List, check or empty the cached prefixes that --kv-persist keeps in a directory.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_Directory = Annotated[Path, typer.Argument(help="As given to --kv-persist.", metavar="DIR")]
_PIPED_WIDTH = 160


@app.command("list")
def list_command(
    directory: _Directory,
    as_json: Annotated[bool, typer.Option("--json", help="All that blocks depend on.")] = False,
) -> None:
    """List the spaces of a directory, the last used first.

    A space has the blocks of one model, build, processor and set of options, for one kind of
    layers. Only an engine of equal ones finds them.
    """
    spaces = list_spaces(_checked(directory))
    if as_json:
        print(json.dumps([_as_dict(space) for space in spaces], indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for name in ("space", "model", "kind", "type", "kernels", "version"):
        table.add_column(name, no_wrap=True)
    for name in ("blocks", "size"):
        table.add_column(name, no_wrap=True, justify="right")
    table.add_column("last used", no_wrap=True)
    for space in spaces:
        table.add_row(*_row(space))
    console = Console() if sys.stdout.isatty() else Console(width=_PIPED_WIDTH)
    console.print(table)


@app.command("verify")
def verify_command(
    directory: _Directory,
    remove: Annotated[bool, typer.Option("--remove", help="Remove what is broken.")] = False,
) -> None:
    """Read all blocks and compare their checksums; exit with 1 if one is broken.

    An engine compares them, too, whenever it reads one, and computes what is broken again.
    """
    num_blocks, num_bytes, broken = verify(_checked(directory), remove=remove)
    for file in broken:
        print(f"{file.path}: {file.reason}", file=sys.stderr)
    ending = " and removed" if remove and broken else ""
    print(f"{num_blocks} blocks, {format_size(num_bytes)}: {len(broken)} are broken{ending}")
    if broken and not remove:
        raise typer.Exit(1)


@app.command("clear")
def clear_command(
    directory: _Directory,
    space: Annotated[
        str | None, typer.Option(help="Of this space alone.", show_default="all")
    ] = None,
) -> None:
    """Remove blocks. Engines that use the directory go on, and compute what they do not find."""
    known = [each.name for each in list_spaces(_checked(directory))]
    if space is not None and space not in known:
        raise ConfigurationError(
            f"space: there is no {space!r} in {directory}: there is {', '.join(known) or 'none'}"
        )
    num_blocks, num_bytes = clear(directory, space)
    print(f"{num_blocks} blocks removed, {format_size(num_bytes)}")


def _checked(directory: Path) -> Path:
    if not directory.is_dir():
        raise ConfigurationError(f"{directory} is not a directory: give what --kv-persist has")
    return directory


def _as_dict(space: Space) -> dict[str, object]:
    return {
        "space": space.name,
        "blocks": space.num_blocks,
        "bytes": space.num_bytes,
        "used": space.used,
        "identity": space.identity,
    }


def _row(space: Space) -> tuple[str, ...]:
    facts = space.identity
    kernels = facts.get("attention", ())
    used = "never"
    if space.used:
        used = f"{datetime.datetime.fromtimestamp(space.used).astimezone():%Y-%m-%d %H:%M}"
    return (
        space.name,
        str(facts.get("model", "?")),
        str(facts.get("kind", "?")),
        str(facts.get("dtype", "?")),
        ", ".join(map(str, kernels)),
        str(facts.get("version", "?")),
        f"{space.num_blocks:,}",
        format_size(space.num_bytes),
        used,
    )
