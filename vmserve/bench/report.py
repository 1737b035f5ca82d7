"""What the benchmark commands share: consoles, tables, bars, JSON and Markdown."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from vmserve.errors import ConfigurationError, VmserveError

if TYPE_CHECKING:
    import datetime
    from collections.abc import Iterator, Mapping

    from vmserve.bench.alloc.section import Report, SectionResult, Table

__all__ = [
    "check_writable",
    "dump",
    "fresh_directory",
    "make_console",
    "make_directory",
    "markdown",
    "print_table",
    "progress",
    "require_matplotlib",
    "write_text",
]

#: Wide enough for every column, for output that is piped into a file or a pager.
_PIPED_WIDTH = 160


def make_console() -> Console:
    """Standard output, wide where nobody watches."""
    return Console() if sys.stdout.isatty() else Console(width=_PIPED_WIDTH)


def dump(described: Mapping[str, Any]) -> str:
    """JSON with a line per value, and one for a whole list of numbers (traces are long)."""
    text = json.dumps(described, indent=1)
    return re.sub(r"\[[\d\s.,eE+-]+\]", lambda found: " ".join(found[0].split()), text) + "\n"


def markdown(results: Mapping[str, SectionResult], described: Mapping[str, Any]) -> str:
    """The tables, with the machine and the date above them."""
    machine = described["machine"]
    revision = machine["git_revision"] or "unknown"
    where = f"{machine['cpu']}, {machine['num_usable_cores']} cores, revision {revision[:12]}"
    lines = [f"{described['date']}, {where}{', --quick' if described.get('quick') else ''}."]
    for name, result in results.items():
        lines.append(f"\n## {name}\n")
        lines += [table.to_markdown() for table in result.tables]
    return "\n".join(lines)


@contextmanager
def progress(name: str) -> Iterator[Report]:
    """A bar on standard error for whoever watches."""
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
    """Raises :class:`ConfigurationError` where the plots that ``option`` asks for cannot be."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError(
            "plots need matplotlib: install it with pip install 'vmserve[bench]', or leave out "
            f"{option}"
        )


def fresh_directory(parent: Path, date: datetime.date, cpu: str) -> Path:
    """``<date>-<cpu>`` in ``parent``, or the first of ``-2``, ``-3``, ... that is not there yet."""
    stem = f"{date.isoformat()}-{re.sub('[^a-z0-9]+', '-', cpu.lower()).strip('-')}"
    path, count = parent / stem, 1
    while path.exists():
        count += 1
        path = parent / f"{stem}-{count}"
    return path


def make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigurationError(f"cannot write to {path}: it is no directory") from None
    except OSError as error:
        raise ConfigurationError(f"cannot write to {path}: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise ConfigurationError(f"cannot write to {path}: it is not writable")


def check_writable(path: Path | None) -> Path | None:
    """``path``, whose directory is there afterwards: told before minutes go into measuring.

    Raises ConfigurationError for a directory, for what cannot be written, and for "-".
    """
    if path is None:
        return None
    if str(path) == "-":
        raise ConfigurationError(
            "cannot write to standard output, which has the tables: give a file's name instead of -"
        )
    if path.is_dir():
        raise ConfigurationError(f"cannot write {path}: it is a directory")
    make_directory(path.parent)
    if path.exists() and not os.access(path, os.W_OK):
        raise ConfigurationError(f"cannot write {path}: it is not writable")
    return path


def write_text(path: Path, text: str) -> None:
    """Its directory is made. Raises VmserveError where the system refuses: a full disk, say."""
    make_directory(path.parent)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise VmserveError(f"cannot write {path}: {error.strerror}") from None
