"""What benchmark commands show on a terminal, and what they check before they start."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from vmserve.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from vmserve.bench.alloc.section import Report, Table

__all__ = ["make_directory", "print_table", "progress", "require_matplotlib", "terminal"]

#: Wide enough for every column, for output that is piped into a file or a pager.
_PIPED_WIDTH = 160


def terminal() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=_PIPED_WIDTH)


@contextmanager
def progress(name: str) -> Iterator[Report]:
    columns = (TextColumn(name), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda done: bar.update(task, completed=done)


def print_table(console: Console, table: Table) -> None:
    rich = RichTable()
    for index, column in enumerate(table.columns):
        rich.add_column(column, justify="left" if index == 0 else "right")
    for row in table.rows:
        rich.add_row(*row)
    console.print(f"\n{table.title}", style="bold")
    console.print(rich)
    if table.note:
        console.print(table.note)


def require_matplotlib(option: str) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError(
            "plots need matplotlib: install it with pip install 'vmserve[bench]', or leave out "
            f"{option}"
        )


def make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot write to {path}: {error.strerror}") from None
