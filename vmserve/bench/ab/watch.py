"""Progress on standard error for whoever watches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from rich.progress import TaskID

__all__ = ["RunProgress", "watch"]


class RunProgress:
    """One line: how many runs are done of all, what runs now, how many of its requests ended."""

    def __init__(self, bar: Progress, num_runs: int) -> None:
        self._bar = bar
        self._num_runs = num_runs
        self._num_started = 0
        self._task: TaskID = bar.add_task("", total=None)

    def starting(self, what: str, num_requests: int) -> None:
        self._num_started += 1
        self._bar.reset(
            self._task,
            total=num_requests,
            description=f"run {self._num_started} of {self._num_runs}: {what}",
        )

    def finished(self) -> None:
        self._bar.advance(self._task)


@contextmanager
def watch(num_runs: int) -> Iterator[RunProgress]:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        yield RunProgress(bar, num_runs)
