"""``vmserve bench kernels``: runs sections, prints their tables, writes JSON, Markdown, plots."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from vmserve.attention.cpu import CpuBackend
from vmserve.bench import options as opt
from vmserve.bench.kernels.sections import SECTIONS, Options
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
    from collections.abc import Mapping

    from vmserve.bench.alloc.section import SectionResult

__all__ = ["chosen_sections", "kernels_command"]


def kernels_command(
    section: Annotated[
        str | None,
        typer.Option(help=f"Some of {','.join(SECTIONS)}, with commas between. Default: all."),
    ] = None,
    quick: opt.Quick = False,
    seed: Annotated[int, typer.Option(min=0, help="Draws places and orders.")] = 0,
    json_path: opt.JsonPath = None,
    markdown_path: opt.MarkdownPath = None,
    plots: opt.Plots = None,
) -> None:
    """Measure the attention kernels against memory bandwidth and the stock kernel. No model."""
    names = chosen_sections(section)
    if plots is not None:
        require_matplotlib("--plots")
        make_directory(plots)
    options = Options(quick=quick, seed=seed)
    console = make_console()
    load_before = os.getloadavg()[0]
    results = {}
    for name in names:
        with progress(name) as report:
            results[name] = SECTIONS[name](options, report)
        for table in results[name].tables:
            print_table(console, table)
    described = _document(results, options, load_before)
    if json_path is not None:
        write_text(json_path, dump(described))
    if markdown_path is not None:
        write_text(markdown_path, markdown(results, described))
    if plots is not None:
        # Optional: plots are drawn with the `bench` extra.
        from vmserve.bench.kernels.plots import draw  # noqa: PLC0415

        for path in draw(described["sections"], plots):
            console.print(f"drawn: {path}")


def chosen_sections(section: str | None) -> list[str]:
    """The sections of ``--section``, in their order. Raises ConfigurationError for another name."""
    if section is None:
        return list(SECTIONS)
    wanted = {name.strip() for name in section.split(",")}
    unknown = sorted(wanted - set(SECTIONS))
    if unknown:
        raise ConfigurationError(
            f"no section is named {', '.join(map(repr, unknown))}: choose from "
            f"{', '.join(SECTIONS)}"
        )
    return [name for name in SECTIONS if name in wanted]


def _document(
    results: Mapping[str, SectionResult], options: Options, load_before: float
) -> dict[str, Any]:
    """What is written as JSON. The load tells how quiet the machine was: 0 before is quiet."""
    return {
        "schema": "vmserve-bench-kernels",
        "schema_version": 1,
        "benchmark": "kernels",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "quick": options.quick,
        "seed": options.seed,
        "isa": CpuBackend().isa,
        "num_threads": torch.get_num_threads(),
        "load_average_before": round(load_before, 2),
        "load_average_after": round(os.getloadavg()[0], 2),
        "machine": machine_info(("vmserve", "numpy", "torch")),
        "sections": {name: dict(result.data) for name, result in results.items()},
    }
