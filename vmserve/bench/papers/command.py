"""``vmserve bench papers``: runs figures in simulation, prints tables, writes JSON and plots."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from vmserve.bench.machine import machine_info
from vmserve.bench.papers import FIGURES, Options
from vmserve.bench.papers.experiments import EXPERIMENTS
from vmserve.bench.report import (
    dump,
    make_console,
    make_directory,
    markdown,
    print_table,
    progress,
    require_matplotlib,
)
from vmserve.errors import ConfigurationError
from vmserve.simulation.devices import OPT_13B_A100, described

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vmserve.bench.alloc.section import SectionResult

__all__ = ["document", "papers_command"]


def papers_command(
    figure: Annotated[
        str, typer.Option(help=f"Some of {','.join(FIGURES)}, with commas between.")
    ] = ",".join(FIGURES),
    minutes: Annotated[
        float, typer.Option(min=0.05, help="Length of a trace, in simulated minutes.")
    ] = 10.0,
    seed: Annotated[int, typer.Option(min=0, help="Draws lengths, prompts and arrivals.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option(help="Write results.json, tables.md and plots into this directory."),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write everything to this file.")
    ] = None,
    list_all: Annotated[
        bool,
        typer.Option("--list", help="Print both papers' experiments, how each is run, and end."),
    ] = False,
) -> None:
    """Repeat experiments of the PagedAttention paper in simulation: OPT-13B on an A100 40GB."""
    if list_all:
        make_console().print(_all_experiments())
        return
    names = _chosen(figure)
    options = Options(minutes=minutes, seed=seed)
    if output is not None:
        require_matplotlib("--output")
        make_directory(output)
    if json_path is not None:
        make_directory(json_path.parent)
    console = make_console()
    console.print(f"Simulated: {OPT_13B_A100.name}; no GPU was used.")
    results = {}
    for name in names:
        with progress(f"figure {name}") as report:
            results[name] = FIGURES[name](options, report)
        for table in results[name].tables:
            print_table(console, table)
    data = document(results, options)
    if json_path is not None:
        json_path.write_text(dump(data), encoding="utf-8")
    if output is not None:
        # Optional: plots are drawn with the `bench` extra.
        from vmserve.bench.papers.plots import draw  # noqa: PLC0415

        (output / "results.json").write_text(dump(data), encoding="utf-8")
        (output / "tables.md").write_text(markdown(results, data), encoding="utf-8")
        for path in draw(data["figures"], output):
            console.print(f"drawn: {path}")


def _all_experiments() -> Table:
    table = Table("experiment", "what", "state", "command", "ours", "the paper's")
    for each in EXPERIMENTS:
        name = f"{each.paper}, {each.what}"
        table.add_row(name, each.about, each.state, each.command, each.ours, each.theirs)
    return table


def document(results: Mapping[str, SectionResult], options: Options) -> dict[str, Any]:
    """What is written as JSON."""
    return {
        "benchmark": "papers, simulated",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "seed": options.seed,
        "minutes": options.minutes,
        "latency_model": described(OPT_13B_A100),
        "machine": machine_info(("vmserve", "numpy")),
        "figures": {name: dict(result.data) for name, result in results.items()},
    }


def _chosen(text: str) -> list[str]:
    wanted = {name.strip() for name in text.split(",")}
    unknown = sorted(wanted - set(FIGURES))
    if unknown:
        raise ConfigurationError(
            f"--figure: {unknown[0]!r} is not here: choose from {', '.join(FIGURES)}"
        )
    return [name for name in FIGURES if name in wanted]
