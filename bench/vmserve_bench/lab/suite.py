"""A benchmark made of sections: choose them, run them, print and keep what they measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from vmserve.errors import ConfigurationError
from vmserve_bench.lab.report import (
    Report,
    dump,
    head,
    keep,
    make_console,
    make_directory,
    progress,
    write_text,
)
from vmserve_bench.lab.table import SectionResult, markdown, print_table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console

__all__ = ["Suite", "chosen", "numbers"]

Options = TypeVar("Options")


def chosen(option: str, text: str | None, known: Sequence[str]) -> list[str]:
    """Parse names between commas, in the order of ``known``; all without a text.

    Raises ConfigurationError for a name that is not known.
    """
    wanted = set(known) if text is None else {name.strip() for name in text.split(",")}
    if unknown := sorted(wanted - set(known)):
        raise ConfigurationError(
            f"no {option} is named {', '.join(map(repr, unknown))}: choose from {', '.join(known)}"
        )
    return [name for name in known if name in wanted]


def numbers(option: str, text: str, *, least: int = 1, most: int | None = None) -> tuple[int, ...]:
    """Parse whole numbers between commas, in rising order. Raises ConfigurationError."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not part.isdecimal() or int(part) < least or (most is not None and int(part) > most):
            bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise ConfigurationError(
                f"--{option}: {part!r} is no whole number {bounds}; write e.g. 4,16"
            )
    return tuple(sorted({int(part) for part in parts}))


@dataclass(frozen=True)
class Suite(Generic[Options]):
    """``name`` and ``benchmark`` go into the results file, whose sections stand under ``key``.

    ``packages``: whose versions are noted.
    """

    name: str
    sections: Mapping[str, Callable[[Options, Report], SectionResult]]
    packages: tuple[str, ...]
    benchmark: str = ""
    key: str = "sections"

    def measure(
        self,
        names: Sequence[str],
        options: Options,
        told: Callable[[], Mapping[str, Any]] = dict,
        *,
        console: Console | None = None,
        json_path: Path | None = None,
        markdown_path: Path | None = None,
        output: Path | None = None,
    ) -> None:
        """Run sections, print their tables and write the files that were asked for.

        ``told`` is called afterwards for what else the results file says. ``output`` is for JSON
        and tables. Raises ConfigurationError before measuring if files cannot be written.
        """
        if output is not None:
            make_directory(output)
        console = console or make_console()
        results = {}
        for name in names:
            with progress(name if self.key == "sections" else f"figure {name}") as report:
                results[name] = self.sections[name](options, report)
            for table in results[name].tables:
                print_table(console, table)
        described = {
            "schema": f"vmserve-bench-{self.name}",
            "schema_version": 1,
            **head(self.benchmark or self.name, told(), self.packages),
            self.key: {name: dict(result.data) for name, result in results.items()},
        }
        tables = markdown(results, described)
        for path, text in ((json_path, dump(described)), (markdown_path, tables)):
            if path is not None:
                write_text(path, text)
        if output is not None:
            keep(output, described, tables)
