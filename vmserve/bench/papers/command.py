"""``vmserve bench papers``: runs figures, simulated or real; prints tables, writes JSON, plots."""

from __future__ import annotations

import enum
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.table import Table

from vmserve.bench import options as opt
from vmserve.bench.ab.results import busy_warning
from vmserve.bench.machine import machine_info
from vmserve.bench.papers import FIGURES, Options
from vmserve.bench.papers.experiments import EXPERIMENTS
from vmserve.bench.papers.points import RealOptions
from vmserve.bench.papers.real import REAL_PAGED
from vmserve.bench.papers.real_virtual import REAL_VIRTUAL
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
from vmserve.models.hub import EMBEDDED_NAME
from vmserve.simulation.devices import OPT_13B_A100, described

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rich.console import Console

    from vmserve.bench.alloc.section import Report, SectionResult

__all__ = ["REAL_FIGURES", "EngineKind", "chosen", "document", "papers_command", "real_document"]

_Options = TypeVar("_Options")

#: By name, in the order in which they run; vAttention's have a v.
REAL_FIGURES: Mapping[str, Callable[[RealOptions, Report], SectionResult]] = MappingProxyType(
    {**REAL_PAGED, **REAL_VIRTUAL}
)
_QUICK_MINUTES = 0.1


class EngineKind(enum.StrEnum):
    simulated = "simulated"
    real = "real"


def papers_command(
    figure: Annotated[
        str | None,
        typer.Option(
            help=f"Some, with commas between: {','.join(FIGURES)} simulated; "
            f"{','.join(REAL_FIGURES)} on the real engine (v: vAttention's). Default: all of the "
            "engine's."
        ),
    ] = None,
    engine: Annotated[
        EngineKind,
        typer.Option(
            help="simulated: OPT-13B on an A100, its times computed; real: this machine's "
            "processor, measured."
        ),
    ] = EngineKind.simulated,
    everything: Annotated[
        bool, typer.Option("--all", help="All figures of the engine, which is the default, too.")
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.05, help="Length of a trace, in simulated minutes. Default: 10."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Of the real engine: a directory or hub id. Default: vmserve-embedded."),
    ] = None,
    quick: opt.Quick = False,
    seed: Annotated[int, typer.Option(min=0, help="Draws lengths, prompts and arrivals.")] = 0,
    output: opt.Output = None,
    json_path: opt.JsonPath = None,
    list_all: Annotated[
        bool,
        typer.Option("--list", help="Print both papers' experiments, how each is run, and end."),
    ] = False,
) -> None:
    """Repeat experiments of the PagedAttention and vAttention papers.

    In simulation, with the papers' model and device, or on the real engine, with the embedded
    model on this machine's processor and everything made smaller: under three minutes a figure.

    \b
    Examples:
      vmserve bench papers --figure 13
      vmserve bench papers --figure 13 --engine real
      vmserve bench papers --all --engine real --output DIR
    """
    if list_all:
        make_console().print(_all_experiments())
        return
    if everything and figure is not None:
        raise ConfigurationError("--all and --figure exclude each other: give one")
    if output is not None:
        if engine is EngineKind.simulated:  # of the real engine there are no plots
            require_matplotlib("--output")
        make_directory(output)
    console = make_console()
    if engine is EngineKind.real:
        if minutes is not None:
            raise ConfigurationError("--minutes is of simulated traces: leave it out, or --engine")
        options = RealOptions(quick=quick, seed=seed, model=model)
        if busy := busy_warning():
            console.print(busy)
        results = _run(REAL_FIGURES, chosen(figure, REAL_FIGURES), options, console)
        data = real_document(results, options)
    else:
        if model is not None:
            raise ConfigurationError("--model is of the real engine: add --engine real")
        if quick and minutes is not None:
            raise ConfigurationError("--quick and --minutes exclude each other: give one")
        simulated = Options(minutes=minutes or (_QUICK_MINUTES if quick else 10.0), seed=seed)
        console.print(f"Simulated: {OPT_13B_A100.name}; no GPU was used.")
        results = _run(FIGURES, chosen(figure, FIGURES), simulated, console)
        data = document(results, simulated)
    if json_path is not None:
        write_text(json_path, dump(data))
    if output is not None:
        write_text(output / "results.json", dump(data))
        write_text(output / "tables.md", markdown(results, data))
        if engine is EngineKind.simulated:
            # Optional: plots are drawn with the `bench` extra.
            from vmserve.bench.papers.plots import draw  # noqa: PLC0415

            for path in draw(data["figures"], output):
                console.print(f"drawn: {path}")


def _run(
    figures: Mapping[str, Callable[[_Options, Report], SectionResult]],
    names: Sequence[str],
    options: _Options,
    console: Console,
) -> dict[str, SectionResult]:
    results = {}
    for name in names:
        with progress(f"figure {name}") as report:
            results[name] = figures[name](options, report)
        for table in results[name].tables:
            print_table(console, table)
    return results


def _all_experiments() -> Table:
    table = Table("experiment", "what", "state", "command", "ours", "the paper's", "real engine")
    for each in EXPERIMENTS:
        name = f"{each.paper}, {each.what}"
        row = (name, each.about, each.state, each.command, each.ours, each.theirs)
        table.add_row(*row, each.of_real)
    return table


def document(results: Mapping[str, SectionResult], options: Options) -> dict[str, Any]:
    """What is written as JSON of a simulation."""
    return {
        "schema": "vmserve-bench-papers-simulated",
        "schema_version": 1,
        "benchmark": "papers, simulated",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "seed": options.seed,
        "minutes": options.minutes,
        "latency_model": described(OPT_13B_A100),
        "machine": machine_info(("vmserve", "numpy")),
        "figures": {name: dict(result.data) for name, result in results.items()},
    }


def real_document(results: Mapping[str, SectionResult], options: RealOptions) -> dict[str, Any]:
    """What is written as JSON of the real engine."""
    return {
        "schema": "vmserve-bench-papers",
        "schema_version": 1,
        "benchmark": "papers, real",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "seed": options.seed,
        "quick": options.quick,
        "model": options.model or EMBEDDED_NAME,
        "machine": machine_info(("vmserve", "numpy", "torch")),
        "figures": {name: dict(result.data) for name, result in results.items()},
    }


def chosen(text: str | None, figures: Mapping[str, object]) -> list[str]:
    """Those of ``--figure``, in their order; all without. Raises ConfigurationError for others."""
    if text is None:
        return list(figures)
    wanted = {name.strip() for name in text.split(",")}
    unknown = sorted(wanted - set(figures))
    if unknown:
        kinds = {"real": REAL_FIGURES, "simulated": FIGURES}
        other = [kind for kind, has in kinds.items() if unknown[0] in has]
        raise ConfigurationError(
            f"--figure: {unknown[0]!r} is not here: choose from {', '.join(figures)}"
            + "".join(f", or give --engine {kind}" for kind in other)
        )
    return [name for name in figures if name in wanted]
