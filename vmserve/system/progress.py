"""Progress on standard error for whoever watches; nothing where nobody does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["generation_progress", "loading_progress"]


@contextmanager
def generation_progress(num_requests: int, show: bool) -> Iterator[Callable[[int], None]]:
    """Yields ``report(num_generated_tokens)``, to be called once for each finished request."""
    if not show:
        yield lambda num_tokens: None
        return
    # Only now: few watch, and rich takes its time.
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=num_requests, tokens=0)
        tokens = 0

        def report(num_tokens: int) -> None:
            nonlocal tokens
            tokens += num_tokens
            bar.update(task, advance=1, tokens=tokens)

        yield report


@contextmanager
def loading_progress(show: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Yields ``report(phase, done_bytes, total_bytes)``."""
    if not show:
        yield lambda phase, done, total: None
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda phase, done, total: bar.update(
            task, description=phase, completed=done, total=total
        )
