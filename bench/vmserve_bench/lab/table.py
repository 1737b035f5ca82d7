"""Tables, printed and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.table import Table as RichTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.console import Console

__all__ = [
    "Cell",
    "SectionResult",
    "Table",
    "interval",
    "markdown",
    "markdown_table",
    "microseconds",
    "print_table",
    "table_of",
]

#: A format over the keys of a row that is a mapping, or a function of the row.
Cell: TypeAlias = "str | Callable[[Any], str]"


@dataclass(frozen=True, slots=True)
class Table:
    """A table ready to be read: every row has a cell for every column."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.title}: {len(self.columns)} columns, a row of {len(row)}")

    def to_markdown(self) -> str:
        lines = [f"**{self.title}**", "", *markdown_table(self.columns, self.rows)]
        if self.note:
            lines += ["", self.note]
        return "\n".join(lines) + "\n"


def table_of(
    title: str,
    rows: Iterable[Any],
    columns: Mapping[str, Cell] | Iterable[str] | None = None,
    note: str = "",
) -> Table:
    """A table with a line for each row.

    ``columns``: how each cell is told, by heading; or the names of values (default: all of a row),
    of which ``a/b`` is b within a. A value that has names itself becomes a column for each.
    """
    if isinstance(columns, Mapping):
        tell = columns.values()
        lines = [
            tuple(how.format(**row) if isinstance(how, str) else how(row) for how in tell)
            for row in rows
        ]
        return Table(title, tuple(columns), tuple(lines), note)
    names = None if columns is None else list(columns)
    flat = [dict(_flat(row, names or row)) for row in rows]
    cells = tuple(tuple(map(_text, row.values())) for row in flat)
    # Spaces, where a narrow column may break.
    return Table(title, tuple(name.replace("_", " ") for name in flat[0]), cells, note)


def _flat(row: Mapping[str, Any], names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    for name in names:
        heading, value = name, row.get(name)
        if name not in row:
            heading, value = name.replace("/", " "), reduce(getitem, name.split("/"), row)
        if isinstance(value, dict):
            yield from ((f"{heading} {inner}", each) for inner, each in value.items())
        else:
            yield heading, value


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value or "")


def interval(value: float, low: float | None, high: float | None, digits: int = 3) -> str:
    """The value with its bounds, if there are any (None or NaN: too few rounds)."""
    if low is None or high is None or math.isnan(low):
        return f"{value:.{digits}f}"
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


@dataclass(frozen=True, slots=True)
class SectionResult:
    """``data`` is plain JSON: what the tables and the plots are made of."""

    data: Mapping[str, Any]
    tables: tuple[Table, ...] = field(default=())


def markdown(results: Mapping[str, SectionResult], described: Mapping[str, Any]) -> str:
    """The tables, below when and where they were measured (``machine`` and ``date``)."""
    machine = described["machine"]
    where = [described["date"], machine["cpu"], f"{machine['num_usable_cores']} cores"]
    where.append(f"revision {(machine['git_revision'] or 'unknown')[:12]}")
    where += ["--quick"] if described.get("quick") else []
    lines = [f"{', '.join(where)}."]
    for name, result in results.items():
        lines.append(f"\n## {name}\n")
        lines += [each.to_markdown() for each in result.tables]
    return "\n".join(lines)


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


def microseconds(nanoseconds: float) -> str:
    """Three significant digits, in microseconds."""
    value = nanoseconds / 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def markdown_table(
    columns: Sequence[str], rows: Iterable[Iterable[str]], num_left: int = 1
) -> list[str]:
    """Lines of a table; all columns but the first ``num_left`` are aligned to the right."""
    rule = "|" + "---|" * num_left + "---:|" * (len(columns) - num_left)
    head, *body = (f"| {' | '.join(cells)} |" for cells in (columns, *rows))
    return [head, rule, *body]
