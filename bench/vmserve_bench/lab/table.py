"""Tables, printed and as Markdown."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.table import Table as RichTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import Console

__all__ = [
    "SectionResult",
    "Table",
    "heading",
    "interval",
    "markdown",
    "markdown_table",
    "microseconds",
    "print_table",
    "table_of",
]


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


def table_of(title: str, rows: Sequence[Mapping[str, str]], note: str = "") -> Table:
    """A table of rows that have their cells by column, all the same columns."""
    return Table(title, tuple(rows[0]), tuple(tuple(row.values()) for row in rows), note)


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


def heading(date: str, machine: Mapping[str, Any]) -> str:
    """When and where, for the top of tables."""
    revision = (machine["git_revision"] or "unknown")[:12]
    return f"{date}, {machine['cpu']}, {machine['num_usable_cores']} cores, revision {revision}"


def markdown(results: Mapping[str, SectionResult], described: Mapping[str, Any]) -> str:
    """The tables, with the machine and the date above them."""
    where = heading(described["date"], described["machine"])
    lines = [f"{where}{', --quick' if described.get('quick') else ''}."]
    for name, result in results.items():
        lines.append(f"\n## {name}\n")
        lines += [table.to_markdown() for table in result.tables]
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
