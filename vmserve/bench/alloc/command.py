"""``vmserve bench alloc``: runs sections, prints their tables, writes JSON, Markdown and plots."""

from __future__ import annotations

import enum
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmserve.bench import options as opt
from vmserve.bench.alloc import SECTIONS, Options
from vmserve.bench.alloc.section import CUDA_SECTIONS, make_driver
from vmserve.bench.machine import machine_info
from vmserve.bench.report import (
    dump,
    make_console,
    make_directory,
    markdown,
    print_table,
    progress,
    require_matplotlib,
    write_text,
)
from vmserve.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vmserve.bench.alloc.section import SectionResult

__all__ = ["alloc_command", "chosen_sections", "document", "dump", "markdown", "run_sections"]


class Driver(enum.StrEnum):
    host = "host"
    cuda = "cuda"


def alloc_command(
    section: Annotated[
        str | None,
        typer.Option(help=f"Some of {','.join(SECTIONS)}, with commas between. Default: all."),
    ] = None,
    driver: Annotated[
        Driver,
        typer.Option(help=f"Whose pages are measured; cuda for {' and '.join(CUDA_SECTIONS)}."),
    ] = Driver.host,
    quick: opt.Quick = False,
    seed: Annotated[int, typer.Option(min=0, help="Draws traces and orders.")] = 0,
    json_path: opt.JsonPath = None,
    markdown_path: opt.MarkdownPath = None,
    plots: opt.Plots = None,
) -> None:
    """Measure what allocating KV memory costs, and how little of it is wasted. No model needed."""
    names = chosen_sections(section, driver.value)
    if plots is not None:
        require_matplotlib("--plots")
        make_directory(plots)
    options = Options(quick=quick, seed=seed, driver=driver.value)
    if driver is Driver.cuda:
        make_driver("cuda", 2 << 20, 1)  # refuses here, before anything is measured
    console = make_console()
    results = {}
    for name in names:
        results.update(run_sections([name], options))
        for table in results[name].tables:
            print_table(console, table)
    described = document(results, options)
    if json_path is not None:
        write_text(json_path, dump(described))
    if markdown_path is not None:
        write_text(markdown_path, markdown(results, described))
    if plots is not None:
        # Optional: plots are drawn with the `bench` extra.
        from vmserve.bench.alloc.plots import draw  # noqa: PLC0415

        for path in draw(described["sections"], plots):
            console.print(f"drawn: {path}")


def chosen_sections(section: str | None, driver: str) -> list[str]:
    """The sections of ``--section``, in the order in which they run.

    Raises ConfigurationError for a name that is none, and for one that the driver cannot have.
    """
    possible = list(SECTIONS) if driver == "host" else list(CUDA_SECTIONS)
    if section is None:
        return possible
    wanted = {name.strip() for name in section.split(",")}
    unknown = sorted(wanted - set(SECTIONS))
    if unknown:
        raise ConfigurationError(
            f"no section is named {', '.join(map(repr, unknown))}: choose from "
            f"{', '.join(SECTIONS)}"
        )
    impossible = sorted(wanted - set(possible))
    if impossible:
        raise ConfigurationError(
            f"{', '.join(impossible)} cannot be measured with --driver {driver}: choose from "
            f"{', '.join(possible)}"
        )
    return [name for name in possible if name in wanted]


def run_sections(names: Sequence[str], options: Options) -> dict[str, SectionResult]:
    """Each section's result, with a bar on standard error for whoever watches."""
    results = {}
    for name in names:
        with progress(name) as report:
            results[name] = SECTIONS[name](options, report)
    return results


def document(results: Mapping[str, SectionResult], options: Options) -> dict[str, Any]:
    """What is written as JSON."""
    return {
        "schema": "vmserve-bench-alloc",
        "schema_version": 1,
        "benchmark": "alloc",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "quick": options.quick,
        "seed": options.seed,
        "driver": options.driver,
        "machine": machine_info(("vmserve", "numpy")),
        "sections": {name: dict(result.data) for name, result in results.items()},
    }
