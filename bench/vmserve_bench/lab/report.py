"""Consoles, progress bars and results files of the benchmark commands."""

from __future__ import annotations

import datetime
import json
import math
import os
import re
import sys
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from vmserve.errors import ConfigurationError, VmserveError
from vmserve_bench.lab.machine import PACKAGES, cpu_model, machine_info

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

#: Callback for the share of a section that is done, 0 to 1.
Report: TypeAlias = "Callable[[float], None]"

__all__ = [
    "Report",
    "RunProgress",
    "check_writable",
    "dump",
    "head",
    "keep",
    "kept_arguments",
    "make_console",
    "make_directory",
    "progress",
    "replace_text",
    "results_directory",
    "watch",
    "write_text",
]

#: Columns of output that is piped into a file or a pager: wide enough for every table.
_PIPED_WIDTH = 160


def make_console() -> Console:
    """Console on standard output, wide if it is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=_PIPED_WIDTH)


def dump(described: Mapping[str, Any]) -> str:
    """Format JSON with a line per value, and one per list of numbers (traces are long).

    Numbers without a value (of an interval that has no end) are null.
    """
    text = json.dumps(_finite(described), indent=1)
    return re.sub(r"\[[\d\s.,eE+-]+\]", lambda found: " ".join(found[0].split()), text) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def _bar(*columns: ProgressColumn) -> Iterator[Progress]:
    """Progress bar on standard error, if that is a terminal."""
    console = Console(stderr=True)
    shown = (TextColumn("{task.description}"), BarColumn(), *columns, TimeElapsedColumn())
    hidden = not console.is_terminal
    with Progress(*shown, console=console, transient=True, disable=hidden) as bar:
        yield bar


@contextmanager
def progress(name: str) -> Iterator[Report]:
    """Progress of a section."""
    with _bar(TaskProgressColumn()) as bar:
        task = bar.add_task(name, total=1.0)
        yield lambda done: bar.update(task, completed=done)


class RunProgress:
    """Progress line: the run of how many, its name, and its requests that ended."""

    def __init__(self, bar: Progress, num_runs: int) -> None:
        self._bar = bar
        self._num_runs = num_runs
        self._num_started = 0
        self._task = bar.add_task("", total=None)

    def starting(self, what: str, num_requests: int) -> None:
        self._num_started += 1
        name = f"run {self._num_started} of {self._num_runs}: {what}"
        self._bar.reset(self._task, total=num_requests, description=name)

    def finished(self) -> None:
        self._bar.advance(self._task)


@contextmanager
def watch(num_runs: int) -> Iterator[RunProgress]:
    with _bar(MofNCompleteColumn()) as bar:
        yield RunProgress(bar, num_runs)


def head(
    benchmark: str, told: Mapping[str, Any], packages: Sequence[str] = PACKAGES
) -> dict[str, Any]:
    """What a results file begins with; ``told``: with what options and the like."""
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {"benchmark": benchmark, "date": date, **told, "machine": machine_info(packages)}


def results_directory(script: str, *, device: str | None = None, root: str = "") -> Path:
    """``<date>-<device>``, or the first of ``-2``, ``-3``, ... that is not there yet.

    It is in ``root``, by default in ``results`` next to ``script``. ``device``: by default the
    processor.
    """
    parent = Path(root) if root else Path(script).resolve().parent / "results"
    name = re.sub("[^a-z0-9]+", "-", (device or cpu_model()).lower()).strip("-")
    stem = f"{datetime.datetime.now(datetime.UTC).date()}-{name}"
    names = chain([stem], (f"{stem}-{number}" for number in count(2)))
    return next(path for path in map(parent.joinpath, names) if not path.exists())


def keep(directory: Path, described: Mapping[str, Any], tables: str) -> None:
    """Write ``results.json`` and ``tables.md``."""
    write_text(directory / "results.json", dump(described))
    write_text(directory / "tables.md", tables)


def kept_arguments(command: str, script: str, *, output: bool = False) -> list[str]:
    """Arguments for ``vmserve bench`` that write JSON and Markdown to a fresh directory.

    That is ``results/<date>-<cpu>`` next to ``script``. ``output``: the command has one option for
    both files.
    """
    directory = str(results_directory(script))
    files = ["--json", f"{directory}/results.json", "--markdown", f"{directory}/tables.md"]
    files = ["--output", directory] if output else files
    return ["vmserve", "bench", command, *files, *sys.argv[1:]]


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
    """Make the directory of ``path`` and check it, before minutes go into measuring.

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
    """Write a file and make its directory. Raises VmserveError, e.g. on a full disk."""
    make_directory(path.parent)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise VmserveError(f"cannot write {path}: {error.strerror}") from None


def replace_text(path: Path, text: str) -> None:
    """Write a file in one go, so that it is whole at any time. Makes its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
